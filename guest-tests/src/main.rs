//! The `clocklab` command.
fn main() {}
