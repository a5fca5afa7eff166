//! Tells the program its own revision, for reports.

use std::process::Command;

fn main() {
    let described = Command::new("git").args(["describe", "--always", "--dirty"]).output();
    let revision = described
        .ok()
        .filter(|output| output.status.success())
        .and_then(|output| String::from_utf8(output.stdout).ok());
    println!("cargo::rustc-env=GIT_REVISION={}", revision.as_deref().unwrap_or("unknown").trim());
    println!("cargo::rerun-if-changed=../.git/HEAD");
    println!("cargo::rerun-if-changed=../.git/index");
}
