//! Failures a person can act on, and how a person is told.

use std::fmt;
use std::io::Write;

/// One line: what failed, on what, and what to change. Ends the process with
/// exit code 35.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Error(String);

/// A result whose failure is one line for a person.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Takes the line, without a final full stop and without `vmm:` before it.
    pub fn new(line: impl Into<String>) -> Self {
        Self(line.into())
    }
}

/// Writes to standard error. One that takes nothing, on a full disk or with nobody at
/// its other end, changes neither the run nor its exit code.
pub fn tell(text: impl fmt::Display) {
    let _ = std::io::stderr().write_all(text.to_string().as_bytes());
}
