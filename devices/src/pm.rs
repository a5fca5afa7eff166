//! ACPI fixed hardware: PM1 event and control registers, the PM timer and the reset register.
//!
//! ACPI 6.5 §4.8.3. The machine is born in ACPI mode (SCI_EN set, no SMI command port). No fixed
//! event ever becomes pending, so the SCI is never raised and the status register reads zero but
//! for TMR_STS, which follows the timer's top bit.
//!
//! Threats: powers the machine off or resets it, which is its purpose. The state is a few words.

use std::sync::{Arc, Mutex, PoisonError};

use crate::Signal;
use crate::bus::Device;
use crate::clock::Clock;

/// Suggested first port of the block.
pub const BASE: u64 = 0x600;
/// Length of the block in bytes.
pub const LEN: u64 = 12;
/// Offset of PM1_EVT (status, then enable): 4 bytes.
pub const PM1_EVT: u64 = 0;
/// Offset of PM1_CNT: 2 bytes.
pub const PM1_CNT: u64 = 4;
/// Offset of the PM timer: 4 bytes, 32 bits count (TMR_VAL_EXT belongs in the FADT).
pub const PM_TMR: u64 = 8;
/// SLP_TYP that the DSDT's `_S5` package must name.
pub const S5_SLEEP_TYPE: u8 = 5;
/// The PM timer's frequency.
pub const PM_TIMER_HZ: u64 = 3_579_545;

/// Port of the reset register (FADT RESET_REG), 1 byte.
pub const RESET_PORT: u64 = 0xCF9;
/// What resets the machine there (FADT RESET_VALUE).
pub const RESET_VALUE: u8 = 6;

/// TMR_STS, byte 0 of the status and of the enable register.
const TMR: u8 = 1 << 0;
/// Enable bits that are kept: TMR and GBL, PWRBTN, SLPBTN and RTC in the second byte.
const ENABLE_MASK: [u8; 2] = [TMR | 1 << 5, 0b0000_0111];
/// PM1_CNT byte 0: ACPI mode.
const SCI_EN: u8 = 1 << 0;
/// PM1_CNT byte 0: bus masters wake the processor.
const BM_RLD: u8 = 1 << 1;
/// PM1_CNT byte 1: SLP_TYP.
const SLP_TYP_SHIFT: u8 = 2;
const SLP_TYP_MASK: u8 = 0b111 << SLP_TYP_SHIFT;
/// PM1_CNT byte 1: SLP_EN, write-only.
const SLP_EN: u8 = 1 << 5;

/// Everything that a snapshot needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PmState {
    /// PM1 enable register.
    pub enable: [u8; 2],
    /// PM1 control register without SCI_EN and SLP_EN.
    pub control: [u8; 2],
    /// The timer's top bit when TMR_STS was last cleared.
    pub top_bit_seen: bool,
}

/// The PM1 block and the PM timer.
pub struct Pm {
    state: Mutex<PmState>,
    clock: Arc<dyn Clock>,
    poweroff: Signal,
}

/// The PM timer's value at a reference time: 32 bits, 3.579545 MHz.
pub fn timer_value(now_10ns: u64) -> u32 {
    // The product has 86 bits; the quotient is meant to wrap.
    (u128::from(now_10ns) * u128::from(PM_TIMER_HZ) / 100_000_000) as u32
}

impl Pm {
    /// A block after power-on; `poweroff` is called when the guest enters S5.
    pub fn new(clock: Arc<dyn Clock>, poweroff: Signal) -> Self {
        Self::from_state(PmState::default(), clock, poweroff)
    }

    /// A block as [`Pm::state`] described it.
    pub fn from_state(state: PmState, clock: Arc<dyn Clock>, poweroff: Signal) -> Self {
        Self { state: Mutex::new(state), clock, poweroff }
    }

    /// A copy of the registers.
    pub fn state(&self) -> PmState {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn top_bit(&self) -> bool {
        timer_value(self.clock.now_10ns()) >> 31 != 0
    }

    /// Takes one byte; true if the machine is to be powered off.
    fn write_byte(&self, offset: u64, byte: u8) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match offset {
            0 if byte & TMR != 0 => state.top_bit_seen = self.top_bit(),
            2 | 3 => {
                let index = (offset - 2) as usize;
                state.enable[index] = byte & ENABLE_MASK[index];
            }
            4 => state.control[0] = byte & BM_RLD,
            5 => {
                state.control[1] = byte & SLP_TYP_MASK;
                return byte & SLP_EN != 0
                    && (byte & SLP_TYP_MASK) >> SLP_TYP_SHIFT == S5_SLEEP_TYPE;
            }
            _ => {}
        }
        false
    }
}

impl Device for Pm {
    fn read(&self, offset: u64, data: &mut [u8]) {
        // The timer is read in loops by every vCPU: it needs no lock.
        if offset >= PM_TMR {
            let timer = timer_value(self.clock.now_10ns()).to_le_bytes();
            fill(data, &timer, offset - PM_TMR);
            return;
        }
        let timer_wrapped = |state: &PmState| state.top_bit_seen != self.top_bit();
        let state = self.state();
        let mut image = [0; LEN as usize];
        image[0] = if timer_wrapped(&state) { TMR } else { 0 };
        image[2..4].copy_from_slice(&state.enable);
        image[4..6].copy_from_slice(&[state.control[0] | SCI_EN, state.control[1]]);
        image[8..].copy_from_slice(&timer_value(self.clock.now_10ns()).to_le_bytes());
        fill(data, &image, offset);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        for (offset, &byte) in (offset..).zip(data) {
            if self.write_byte(offset, byte) {
                (self.poweroff)();
            }
        }
    }
}

/// Copies the bytes of `image` from `offset` on into `data`; zeros behind its end.
fn fill(data: &mut [u8], image: &[u8], offset: u64) {
    for (position, byte) in (offset as usize..).zip(data) {
        *byte = image.get(position).copied().unwrap_or(0);
    }
}

/// The reset register.
pub struct ResetPort(Signal);

impl ResetPort {
    /// `reset` is called when the guest writes [`RESET_VALUE`].
    pub fn new(reset: Signal) -> Self {
        Self(reset)
    }
}

impl Device for ResetPort {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&self, _offset: u64, data: &[u8]) {
        // Bit 2 resets the processor; bits 1 and 3 only choose how hard.
        if data.first().is_some_and(|byte| byte & 1 << 2 != 0) {
            (self.0)();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::testing::FakeClock;

    fn bench() -> (Pm, Arc<FakeClock>, Arc<AtomicUsize>) {
        let clock = Arc::new(FakeClock::default());
        let offs = Arc::new(AtomicUsize::new(0));
        let counter = offs.clone();
        let poweroff = Box::new(move || {
            counter.fetch_add(1, Ordering::Relaxed);
        });
        (Pm::new(clock.clone(), poweroff), clock, offs)
    }

    fn read<const N: usize>(device: &impl Device, offset: u64) -> [u8; N] {
        let mut data = [0xAA; N];
        device.read(offset, &mut data);
        data
    }

    #[test]
    fn timer_runs_at_its_frequency_and_wraps_at_32_bits() {
        let (pm, clock, _) = bench();
        for (now, expected) in [
            (0, 0),
            (100_000_000, 3_579_545),
            (28, 1),
            (27, 0),
            // 1200 s is the first whole minute past the wrap at 1199.86 s.
            (120_000_000_000, (1200 * PM_TIMER_HZ % (1 << 32)) as u32),
        ] {
            clock.set(now);
            assert_eq!(u32::from_le_bytes(read(&pm, PM_TMR)), expected, "at {now}");
        }
        clock.set(u64::MAX);
        let _: [u8; 4] = read(&pm, PM_TMR);
    }

    #[test]
    fn timer_status_follows_the_top_bit_until_cleared() {
        let (pm, clock, _) = bench();
        assert_eq!(read(&pm, PM1_EVT), [0, 0]);
        clock.set(60_000_000_000);
        assert_eq!(read(&pm, PM1_EVT), [TMR, 0]);
        pm.write(PM1_EVT, &[0xFE, 0xFF]);
        assert_eq!(read(&pm, PM1_EVT), [TMR, 0], "only a one clears");
        pm.write(PM1_EVT, &[TMR, 0]);
        assert_eq!(read(&pm, PM1_EVT), [0, 0]);
    }

    #[test]
    fn acpi_mode_is_on_and_cannot_be_left() {
        let (pm, ..) = bench();
        pm.write(PM1_CNT, &[0, 0]);
        assert_eq!(read(&pm, PM1_CNT), [SCI_EN, 0]);
    }

    #[test]
    fn enable_bits_read_back_without_the_reserved_ones() {
        let (pm, ..) = bench();
        pm.write(PM1_EVT + 2, &[0xFF, 0xFF]);
        assert_eq!(read(&pm, PM1_EVT), [0, 0, 0x21, 0x07]);
    }

    #[test]
    fn s5_powers_off_and_nothing_else_does() {
        let (pm, _, offs) = bench();
        for slp_typ in 0..8 {
            // As Linux does: first the type, then the type with SLP_EN.
            pm.write(PM1_CNT, &((slp_typ << 10) | 1u16).to_le_bytes());
            let before = offs.load(Ordering::Relaxed);
            pm.write(PM1_CNT, &((slp_typ << 10) | 1 << 13 | 1u16).to_le_bytes());
            let fired = offs.load(Ordering::Relaxed) - before;
            assert_eq!(fired, usize::from(slp_typ == u16::from(S5_SLEEP_TYPE)));
            assert_eq!(read::<2>(&pm, PM1_CNT)[1] & SLP_EN, 0, "SLP_EN is write-only");
        }
        pm.write(PM1_CNT + 1, &[S5_SLEEP_TYPE << 2 | SLP_EN]);
        assert_eq!(offs.load(Ordering::Relaxed), 2, "a byte access will do");
    }

    #[test]
    fn reset_register() {
        let resets = Arc::new(AtomicUsize::new(0));
        let counter = resets.clone();
        let port = ResetPort::new(Box::new(move || {
            counter.fetch_add(1, Ordering::Relaxed);
        }));
        port.write(0, &[2]);
        assert_eq!(resets.load(Ordering::Relaxed), 0);
        port.write(0, &[RESET_VALUE]);
        assert_eq!(resets.load(Ordering::Relaxed), 1);
    }
}
