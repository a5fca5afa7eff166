//! The `vmm` command.
fn main() {}
