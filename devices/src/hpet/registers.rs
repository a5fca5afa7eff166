//! The register map: IA-PC HPET specification 1.0a, §2.3.
//!
//! The only place that knows offsets, bits and access widths. A write becomes a register, a value
//! and the lanes (bits) that it covers; everything behind this module sees 64-bit registers.

/// Where the registers of timer 0 begin, and the distance to those of the next timer.
const TIMER_BASE: u64 = 0x100;
const TIMER_STRIDE: u64 = 0x20;

/// Fewest timers that the specification allows (§2.1).
pub const MIN_TIMERS: usize = 3;
/// Most timers that the capabilities register can tell.
pub const MAX_TIMERS: usize = 32;
/// Words of 8 bytes that hold registers, with 32 timers. (They end at 0x500, past the 1 KiB that
/// the specification gives a block; with 24 timers or fewer they do not.)
pub const IMAGE_WORDS: usize = ((TIMER_BASE + TIMER_STRIDE * MAX_TIMERS as u64) / WORD) as usize;

const WORD: u64 = 8;
/// The lanes of a 4-byte access to the low half.
pub const LOW: u64 = 0xFFFF_FFFF;

/// General capabilities: 100 MHz, that is a period of 10 000 000 fs.
pub const PERIOD_FS: u64 = 10_000_000;
/// Vendor as other implementations for virtual machines give it: Intel.
const VENDOR: u64 = 0x8086;
const CAP_LEGACY: u64 = 1 << 15;
const CAP_64BIT: u64 = 1 << 13;
const REVISION: u64 = 1;

/// General configuration: the counter runs and interrupts are allowed.
pub const ENABLE: u64 = 1 << 0;
/// General configuration: timers 0 and 1 take the place of the PIT and the RTC.
pub const LEGACY: u64 = 1 << 1;

/// Timer configuration: level-triggered.
pub const LEVEL: u64 = 1 << 1;
/// Timer configuration: interrupts enabled.
pub const INT_ENB: u64 = 1 << 2;
/// Timer configuration: periodic.
pub const PERIODIC: u64 = 1 << 3;
const PERIODIC_CAP: u64 = 1 << 4;
const SIZE_CAP: u64 = 1 << 5;
/// Timer configuration: the next comparator write sets the comparator of a periodic timer.
pub const VAL_SET: u64 = 1 << 6;
/// Timer configuration: only the low 32 bits count.
pub const MODE32: u64 = 1 << 8;
/// Timer configuration: the I/O APIC pin.
pub const ROUTE_SHIFT: u32 = 9;
/// Timer configuration: the bits of the I/O APIC pin.
pub const ROUTE: u64 = 0x1F << ROUTE_SHIFT;
/// Timer configuration: interrupts are messages.
pub const FSB_EN: u64 = 1 << 14;
const FSB_CAP: u64 = 1 << 15;
/// Pins that every timer can drive on a 24-pin I/O APIC: the two that legacy replacement uses,
/// and the eight that no ISA device has.
pub const ROUTE_CAP: u32 = 1 << 2 | 1 << 8 | 0xFF << 16;

/// The bits of a timer's configuration that the guest may change and that are kept.
pub const TIMER_WRITABLE: u64 = LEVEL | INT_ENB | PERIODIC | MODE32 | ROUTE | FSB_EN;
/// The bits of a timer's configuration that never change.
pub const TIMER_FIXED: u64 = PERIODIC_CAP | SIZE_CAP | FSB_CAP | (ROUTE_CAP as u64) << 32;

/// The general capabilities register of a block with `timers` timers.
pub fn capabilities(timers: usize) -> u64 {
    let last_timer = timers as u64 - 1;
    PERIOD_FS << 32 | VENDOR << 16 | CAP_LEGACY | CAP_64BIT | last_timer << 8 | REVISION
}

/// A 64-bit register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Register {
    Capabilities,
    Config,
    Status,
    Counter,
    TimerConfig(usize),
    Comparator(usize),
    Fsb(usize),
    Reserved,
}

impl Register {
    /// The register whose word holds `offset`, in a block with `timers` timers.
    pub fn at(offset: u64, timers: usize) -> Self {
        match offset & !(WORD - 1) {
            0x000 => Self::Capabilities,
            0x010 => Self::Config,
            0x020 => Self::Status,
            0x0F0 => Self::Counter,
            word @ TIMER_BASE.. => {
                let timer = ((word - TIMER_BASE) / TIMER_STRIDE) as usize;
                match (word - TIMER_BASE) % TIMER_STRIDE {
                    _ if timer >= timers => Self::Reserved,
                    0x00 => Self::TimerConfig(timer),
                    0x08 => Self::Comparator(timer),
                    0x10 => Self::Fsb(timer),
                    _ => Self::Reserved,
                }
            }
            _ => Self::Reserved,
        }
    }
}

/// A write, folded to the width of a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Write {
    pub register: Register,
    /// The bits that the access covers.
    pub lanes: u64,
    /// What it writes there; zero elsewhere.
    pub value: u64,
}

impl Write {
    /// Folds an access. The specification defines aligned accesses of 4 and 8 bytes (§2.2); any
    /// other does nothing.
    pub fn decode(offset: u64, data: &[u8], timers: usize) -> Option<Self> {
        let len = data.len() as u64;
        if !matches!(len, 4 | 8) || !offset.is_multiple_of(len) {
            return None;
        }
        let shift = 8 * (offset % WORD);
        let mut bytes = [0; WORD as usize];
        bytes[..data.len()].copy_from_slice(data);
        let lanes = if len == WORD { u64::MAX } else { LOW << shift };
        let value = u64::from_le_bytes(bytes) << shift;
        Some(Self { register: Register::at(offset, timers), lanes, value })
    }

    /// `old` after this write.
    pub fn merge(&self, old: u64) -> u64 {
        old & !self.lanes | self.value
    }
}

/// Answers a read of any width and alignment from the words that it touches, so that it reads
/// what it would read from memory.
pub fn read(offset: u64, data: &mut [u8], mut word: impl FnMut(u64) -> u64) {
    let mut position = offset;
    let end = offset + data.len() as u64;
    while position < end {
        let base = position & !(WORD - 1);
        let bytes = word(base).to_le_bytes();
        let stop = end.min(base + WORD);
        data[(position - offset) as usize..(stop - offset) as usize]
            .copy_from_slice(&bytes[(position - base) as usize..(stop - base) as usize]);
        position = stop;
    }
}
