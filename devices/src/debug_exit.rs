//! Ports for test guests: one ends the machine with a code, one is a console of single bytes.
//!
//! Threats: the guest may end the machine and may print without end (bounded by the sink, which
//! must not block).

use std::io::Write;
use std::sync::{Mutex, PoisonError};

use crate::bus::Device;

/// Port of [`DebugExit`].
pub const EXIT_PORT: u64 = 0xF4;
/// Number of ports that [`DebugExit`] claims, so that a 4-byte write is whole.
pub const EXIT_LEN: u64 = 4;
/// Ports of [`DebugConsole`]; both do the same, programs of the trade use one or the other.
pub const CONSOLE_PORTS: [u64; 2] = [0xE8, 0xE9];

/// Ends the machine with the code that is written.
pub struct DebugExit(Box<dyn Fn(u32) + Send + Sync>);

impl DebugExit {
    /// `exit` is called with each code written, of 1, 2 or 4 bytes.
    pub fn new(exit: Box<dyn Fn(u32) + Send + Sync>) -> Self {
        Self(exit)
    }
}

impl Device for DebugExit {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if offset == 0 {
            let mut code = [0; 4];
            for (to, from) in code.iter_mut().zip(data) {
                *to = *from;
            }
            (self.0)(u32::from_le_bytes(code));
        }
    }
}

/// A console without registers: what is written is printed.
pub struct DebugConsole(Mutex<Box<dyn Write + Send>>);

impl DebugConsole {
    /// `output` must not block.
    pub fn new(output: Box<dyn Write + Send>) -> Self {
        Self(Mutex::new(output))
    }
}

impl Device for DebugConsole {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        // What a program reads to find out whether the port is there.
        data.fill(0xE9);
    }

    fn write(&self, _offset: u64, data: &[u8]) {
        // A sink that refuses loses the bytes: there is no status to tell the guest.
        let _ = self.0.lock().unwrap_or_else(PoisonError::into_inner).write_all(data);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::testing::Sink;

    #[test]
    fn exit_code_of_any_width() {
        let codes = Arc::new(Mutex::new(Vec::new()));
        let log = codes.clone();
        let device = DebugExit::new(Box::new(move |code| log.lock().unwrap().push(code)));
        device.write(0, &[7]);
        device.write(0, &[1, 2]);
        device.write(0, &[1, 2, 3, 4]);
        device.write(1, &[9]);
        assert_eq!(*codes.lock().unwrap(), [7, 0x0201, 0x0403_0201]);
    }

    #[test]
    fn console_prints_what_is_written() {
        let sink = Sink::default();
        let console = DebugConsole::new(Box::new(sink.clone()));
        console.write(0, b"o");
        console.write(0, b"k");
        assert_eq!(sink.take(), b"ok");
        let mut probe = [0];
        console.read(0, &mut probe);
        assert_eq!(probe, [0xE9]);
    }
}
