//! The VMM's mark port: it notes its exit counts with each byte written there, so
//! that the host knows what the reads between two marks cost it.

use core::cell::Cell;

use crate::port;

const PORT: u16 = 0x5F0;

/// Numbers marks from 0; a measurement lies between an even one and the next.
#[derive(Debug, Default)]
pub struct Marks(Cell<u8>);

impl Marks {
    /// Writes the next mark.
    pub fn next(&self) {
        port::out8(PORT, self.0.get());
        self.0.set(self.0.get().wrapping_add(1));
    }

    /// The first of the last two marks.
    pub fn last_pair(&self) -> u8 {
        self.0.get().wrapping_sub(2)
    }
}
