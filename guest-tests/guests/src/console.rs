//! COM1, and result lines.

use core::fmt::{self, Write};

use crate::port;

const COM1: u16 = 0x3F8;
const LINE_STATUS: u16 = COM1 + 5;
const DATA_READY: u8 = 1;

/// Sends a byte.
pub fn send(byte: u8) {
    port::out8(COM1, byte);
}

/// Whether a byte has come in.
pub fn has_input() -> bool {
    port::in8(LINE_STATUS) & DATA_READY != 0
}

/// Takes the byte that has come in.
pub fn receive() -> u8 {
    port::in8(COM1)
}

/// The first serial port, write only.
#[derive(Debug)]
pub struct Console;

impl Write for Console {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            send(byte);
        }
        Ok(())
    }
}

/// One result: `@result {"guest":"clock-cost",…}` on a line of its own. Keys are literals and
/// text values are words, so nothing needs escaping.
#[derive(Debug)]
pub struct ResultLine(());

impl ResultLine {
    /// Opens the line with the guest's name.
    pub fn new(guest: &str) -> Self {
        let _ = write!(Console, "@result {{\"guest\":\"{guest}\"");
        Self(())
    }

    /// Adds a number (or a boolean).
    pub fn number(self, key: &str, value: impl fmt::Display) -> Self {
        let _ = write!(Console, ",\"{key}\":{value}");
        self
    }

    /// Adds a string.
    pub fn text(self, key: &str, value: impl fmt::Display) -> Self {
        let _ = write!(Console, ",\"{key}\":\"{value}\"");
        self
    }

    /// Adds an array of numbers.
    pub fn list<T: fmt::Display>(self, key: &str, values: impl IntoIterator<Item = T>) -> Self {
        let _ = write!(Console, ",\"{key}\":[");
        for (position, value) in values.into_iter().enumerate() {
            let comma = if position == 0 { "" } else { "," };
            let _ = write!(Console, "{comma}{value}");
        }
        let _ = write!(Console, "]");
        self
    }

    /// Closes the line.
    pub fn end(self) {
        let _ = Console.write_str("}\n");
    }
}

/// Two numbers, printed as a JSON array.
#[derive(Debug, Clone, Copy)]
pub struct Pair(pub u64, pub u64);

impl fmt::Display for Pair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{},{}]", self.0, self.1)
    }
}
