//! How a run ends, and the exit code that tells.

use std::fmt;

/// Why the machine stopped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ending {
    /// The guest powered itself off.
    PowerOff,
    /// The guest wrote to ACPI's reset register, as Linux does first.
    AcpiReset,
    /// The guest asked the keyboard controller for a reset.
    I8042Reset,
    /// The guest triple-faulted.
    TripleFault,
    /// The guest's kernel told pvpanic that it panicked.
    GuestPanic,
    /// A unit test wrote this code to the port of `--debug-exit`.
    DebugExit(u32),
    /// A file or an argument did not do: found only after the machine was made.
    Refused(String),
    /// `--timeout` ran out.
    Timeout,
    /// KVM could not go on; the text has RIP and the instruction bytes.
    KvmInternalError(String),
    /// A part of this program failed.
    VmmFailure(String),
    /// A person asked: `Ctrl-A x` or `quit` on the control socket.
    Quit,
    /// A signal asked us to end.
    Signal(i32),
}

impl Ending {
    /// The process's exit code: docs/exit-codes.md.
    pub fn code(&self) -> i32 {
        match self {
            Ending::PowerOff | Ending::Quit => 0,
            Ending::AcpiReset => 32,
            Ending::TripleFault => 33,
            Ending::GuestPanic => 34,
            // As runners of such tests expect it. Codes 16 to 18 look like 33, 35
            // and 37; `--stats` and -v tell them apart.
            Ending::DebugExit(code) => (code << 1 | 1) as i32 & 0xff,
            Ending::Refused(_) => 35,
            Ending::Timeout => 36,
            Ending::KvmInternalError(_) => 37,
            Ending::VmmFailure(_) => 38,
            // Even, as no code of `--debug-exit` is.
            Ending::I8042Reset => 40,
            Ending::Signal(number) => 128 + number,
        }
    }

    /// Whether a person should be told on stderr even without `-v`.
    pub fn is_failure(&self) -> bool {
        !matches!(
            self,
            Ending::PowerOff
                | Ending::Quit
                | Ending::AcpiReset
                | Ending::I8042Reset
                | Ending::DebugExit(_)
                | Ending::Signal(_)
        )
    }
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ending::PowerOff => write!(f, "the guest powered off"),
            Ending::AcpiReset => write!(f, "the guest asked ACPI for a reset"),
            Ending::I8042Reset => write!(f, "the guest asked the keyboard controller for a reset"),
            Ending::TripleFault => write!(f, "the guest triple-faulted"),
            Ending::GuestPanic => write!(f, "the guest's kernel panicked"),
            Ending::DebugExit(code) => write!(f, "the guest's test ended with code {code}"),
            Ending::Refused(line) | Ending::VmmFailure(line) => write!(f, "{line}"),
            Ending::Timeout => write!(f, "the time given by --timeout is over"),
            Ending::KvmInternalError(line) => write!(f, "KVM internal error: {line}"),
            Ending::Quit => write!(f, "told to quit"),
            Ending::Signal(number) => write!(f, "ended by signal {number}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_is_distinct_and_documented() {
        let table = include_str!("../../docs/exit-codes.md");
        let endings = [
            Ending::PowerOff,
            Ending::AcpiReset,
            Ending::TripleFault,
            Ending::GuestPanic,
            Ending::Refused("x".into()),
            Ending::Timeout,
            Ending::KvmInternalError("x".into()),
            Ending::VmmFailure("x".into()),
            Ending::I8042Reset,
        ];
        let mut codes: Vec<_> = endings.iter().map(Ending::code).collect();
        for code in &codes {
            assert_eq!(table.matches(&format!("\n| {code} |")).count(), 1, "{code}");
        }
        codes.sort_unstable();
        codes.dedup();
        assert_eq!(codes.len(), endings.len());
        // A unit test's code is never taken for a reset or an end by `--timeout`.
        let odd = (0..256).all(|code| Ending::DebugExit(code).code() & 1 == 1);
        assert!(odd && Ending::I8042Reset.code() & 1 == 0);
    }
}
