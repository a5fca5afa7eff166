//! What the unit tests of hypervisors drive: a scratch register, a page to unmap, interrupt
//! lines by number, and memory that is not RAM.
//!
//! Threats: the guest may raise any line at any rate (what the interrupt controller gets from
//! any device).

use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

use crate::bus::Device;

/// Port of [`Scratch`].
pub const SCRATCH_PORT: u64 = 0xE0;
/// Port of [`FlushPage`].
pub const FLUSH_PORT: u64 = 0xE4;
/// First port of [`IrqLines`]: line n is at this port + n.
pub const IRQ_PORT: u64 = 0x2000;
/// Number of lines, and of ports.
pub const IRQ_LINES: u64 = 24;
/// Guest-physical address of [`IoMemory`].
pub const MEMORY_BASE: u64 = 0xFF00_0000;
/// Bytes of [`IoMemory`].
pub const MEMORY_LEN: u64 = 0x1_0000;
/// Number of ports of [`Scratch`] and of [`FlushPage`].
pub const REGISTER_LEN: u64 = 4;

/// Four bytes that read as they were written, in any width.
#[derive(Default)]
pub struct Scratch(AtomicU32);

impl Device for Scratch {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let bytes = self.0.load(Ordering::Relaxed).to_le_bytes();
        for (to, from) in data.iter_mut().zip(&bytes[offset as usize % 4..]) {
            *to = *from;
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let mut bytes = self.0.load(Ordering::Relaxed).to_le_bytes();
        for (to, from) in bytes[offset as usize % 4..].iter_mut().zip(data) {
            *to = *from;
        }
        self.0.store(u32::from_le_bytes(bytes), Ordering::Relaxed);
    }
}

/// A write names a page that the host may unmap from the guest, content kept. Ours keeps the
/// mapping: the next access is only faster for it, and no result differs.
pub struct FlushPage;

impl Device for FlushPage {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&self, _offset: u64, _data: &[u8]) {}
}

/// Memory that the host serves access by access, so that a guest sees each instruction on it
/// emulated.
pub struct IoMemory(Box<[AtomicU8]>);

impl Default for IoMemory {
    fn default() -> Self {
        Self((0..MEMORY_LEN).map(|_| AtomicU8::new(0)).collect())
    }
}

impl IoMemory {
    fn from(&self, offset: u64) -> &[AtomicU8] {
        self.0.get(offset as usize..).unwrap_or_default()
    }
}

impl Device for IoMemory {
    fn read(&self, offset: u64, data: &mut [u8]) {
        for (to, from) in data.iter_mut().zip(self.from(offset)) {
            *to = from.load(Ordering::Relaxed);
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        for (to, from) in self.from(offset).iter().zip(data) {
            to.store(*from, Ordering::Relaxed);
        }
    }
}

/// Interrupt lines by number: a write sets the level, high unless it is zero.
pub struct IrqLines(Box<dyn Fn(u32, bool) + Send + Sync>);

impl IrqLines {
    /// `set` is called with line (0..24) and level.
    pub fn new(set: Box<dyn Fn(u32, bool) + Send + Sync>) -> Self {
        Self(set)
    }
}

impl Device for IrqLines {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        (self.0)(offset as u32, data.iter().any(|byte| *byte != 0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    #[test]
    fn scratch_reads_as_written_in_any_width() {
        let scratch = Scratch::default();
        scratch.write(0, &[1, 2, 3, 4]);
        scratch.write(1, &[9]);
        scratch.write(2, &[7, 8]);
        let mut data = [0; 4];
        scratch.read(0, &mut data);
        assert_eq!(data, [1, 9, 7, 8]);
        let mut data = [0; 2];
        scratch.read(2, &mut data);
        assert_eq!(data, [7, 8]);
        // Wider than the register: what lies beyond is left alone.
        scratch.write(3, &[5, 6, 6, 6]);
        let mut data = [0xEE; 8];
        scratch.read(0, &mut data);
        assert_eq!(data, [1, 9, 7, 5, 0xEE, 0xEE, 0xEE, 0xEE]);
    }

    #[test]
    fn memory_holds_what_is_written_up_to_its_last_byte() {
        let memory = IoMemory::default();
        memory.write(6, &[1, 2, 3, 4]);
        memory.write(MEMORY_LEN - 2, &[8, 9]);
        let mut data = [0xEE; 8];
        memory.read(4, &mut data);
        assert_eq!(data, [0, 0, 1, 2, 3, 4, 0, 0]);
        let mut data = [0xEE; 2];
        memory.read(MEMORY_LEN - 2, &mut data);
        assert_eq!(data, [8, 9]);
    }

    #[test]
    fn a_line_has_the_level_written_to_its_port() {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let log = seen.clone();
        let lines = IrqLines::new(Box::new(move |n, high| log.lock().unwrap().push((n, high))));
        lines.write(0, &[1]);
        lines.write(23, &[0, 0, 0, 0x80]);
        lines.write(23, &[0]);
        assert_eq!(*seen.lock().unwrap(), [(0, true), (23, true), (23, false)]);
    }
}
