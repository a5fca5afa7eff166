//! Other programs, with the console as theirs.

use crate::report::Result as Report;
use crate::{jobs, system};
use std::process::{Command, ExitStatus};
use std::time::Instant;

/// `exec:PATH:ARGUMENT…`: runs a program and reports how it ended.
///
/// # Errors
/// The program is missing, cannot be started, or fails.
pub fn program(arguments: &[String]) -> Result<(), String> {
    let (path, rest) = arguments.split_first().ok_or("name a program: exec:PATH:ARGUMENT")?;
    let started = Instant::now();
    let status = Command::new(path).args(rest).status().map_err(|e| format!("{path}: {e}"))?;
    system::drain_console();
    Report::of("exec")
        .text("program", path)
        .count("status", exit_code(status))
        .count("elapsed_ms", started.elapsed().as_millis() as u64)
        .print();
    if status.success() { Ok(()) } else { Err(format!("{path}: {status}")) }
}

/// `sh`: an interactive shell with job control on the console; ends at `exit`.
///
/// # Errors
/// There is no shell in the initramfs.
pub fn shell() -> Result<(), String> {
    program(&jobs::parse("/bin/setsid:-c:/bin/cttyhack:/bin/sh").concat())
}

/// A status as a shell gives it: 128 + the signal's number where one ended it.
pub fn exit_code(status: ExitStatus) -> u64 {
    use std::os::unix::process::ExitStatusExt;
    let code = status.code().or(status.signal().map(|signal| 128 + signal));
    u64::from(code.unwrap_or(255).unsigned_abs())
}
