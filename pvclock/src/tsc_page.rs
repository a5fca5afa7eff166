//! The reference TSC page: how the guest gets the clock without an exit.
//!
//! Layout and reader are fixed by TLFS, "Partition Reference Time Stamp Counter
//! Page" and "Partition Reference TSC Mechanism": the guest reads the sequence,
//! the TSC, scale and offset, and the sequence again; it starts over if the
//! sequence moved and uses the reference counter MSR if it is 0.
//!
//! So that a guest never combines a new scale with an old offset, the page says
//! "not valid" (sequence 0) while either changes. The page belongs to the guest
//! once written, which may scribble on it: nothing here is ever read back, the
//! caller keeps the sequence.

use crate::reference::{ReferenceClock, Ticks100ns};
use crate::sync::{AtomicU64, Ordering, fence};

/// Size of the page in bytes.
pub const PAGE_SIZE: usize = 4096;
/// Byte offset of the u32 sequence; a reserved u32, always 0, follows it.
pub const SEQUENCE: usize = 0;
/// Byte offset of the u64 scale.
pub const SCALE: usize = 8;
/// Byte offset of the i64 offset.
pub const OFFSET: usize = 16;

/// Where the page lives.
pub trait PageMemory {
    /// Stores `value`, little-endian, at `offset` bytes into the page as one
    /// relaxed atomic store of 8 bytes. `offset` is one of this module's constants,
    /// so it is aligned and inside the page.
    fn store_u64(&self, offset: usize, value: u64);
}

/// Makes the page show `clock` and returns the sequence it now carries, which the
/// caller passes in as `previous_sequence` next time (0 the first time).
pub fn publish(mem: &impl PageMemory, clock: &ReferenceClock, previous_sequence: u32) -> u32 {
    let sequence = next_sequence(previous_sequence);
    invalidate(mem);
    mem.store_u64(SCALE, clock.scale());
    mem.store_u64(OFFSET, clock.offset() as u64);
    // Scale and offset are visible before the sequence that vouches for them.
    fence(Ordering::Release);
    store_sequence(mem, sequence);
    sequence
}

/// Makes the guest use the reference counter MSR until the next [`publish`].
pub fn invalidate(mem: &impl PageMemory) {
    store_sequence(mem, 0);
    // The invalid mark is visible before anything stored after it.
    fence(Ordering::Release);
}

/// One store covers the sequence and the reserved word, which must be zero.
fn store_sequence(mem: &impl PageMemory, sequence: u32) {
    mem.store_u64(SEQUENCE, u64::from(sequence));
}

/// The successor of a sequence: never 0, which means "use the MSR", nor
/// 0xFFFFFFFF, which meant it in old editions of the specification.
const fn next_sequence(sequence: u32) -> u32 {
    match sequence {
        0xFFFF_FFFE.. => 1,
        _ => sequence + 1,
    }
}

/// A page in our own memory, for tests and for hosts that copy pages whole.
impl PageMemory for [AtomicU64; PAGE_SIZE / 8] {
    fn store_u64(&self, offset: usize, value: u64) {
        self[offset / 8].store(value.to_le(), Ordering::Relaxed);
    }
}

/// What a page that is not being written says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodedPage {
    /// 0 if the page is not valid.
    pub sequence: u32,
    /// Always 0.
    pub reserved: u32,
    /// Ticks per TSC cycle in units of 2^-64.
    pub scale: u64,
    /// The tick at TSC 0.
    pub offset: i64,
}

impl DecodedPage {
    /// Decodes the head of a page copied from guest memory.
    pub fn from_bytes(page: &[u8; PAGE_SIZE]) -> Self {
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| page[at + i]));
        Self {
            sequence: word(SEQUENCE) as u32,
            reserved: (word(SEQUENCE) >> 32) as u32,
            scale: word(SCALE),
            offset: word(OFFSET) as i64,
        }
    }

    /// The guest's formula; `None` where the guest would read the MSR.
    pub fn ticks(&self, tsc: u64) -> Option<Ticks100ns> {
        let high = (u128::from(tsc) * u128::from(self.scale)) >> 64;
        (self.sequence != 0).then(|| Ticks100ns((high as u64).wrapping_add(self.offset as u64)))
    }
}

#[cfg(test)]
mod tests;
