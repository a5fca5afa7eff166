//! The one time source: a line from TSC to 100 ns ticks.
//!
//! The guest's formula is given (TLFS, "Partition Reference TSC Mechanism"):
//!
//! ```text
//! ticks = ((tsc × scale) >> 64) + offset        scale: u64, offset: i64
//! ```
//!
//! so `scale` is the number of ticks per TSC cycle as a 0.64 fixed-point
//! fraction. A tick is 10^-7 s, hence
//!
//! ```text
//! scale = floor(10^7 × 2^64 / f)
//! ```
//!
//! which fits 64 bits exactly when f > 10 MHz. Rounding down loses less than one
//! unit, so the clock is slow by a relative error below
//! 1/scale ≈ f / (10^7 × 2^64): 1.7e-17 at 3 GHz and 5.5e-16 at 100 GHz, the
//! highest frequency accepted here. The product has up to 128 bits; its high half
//! is the tick, its low half the fraction of a tick.
//!
//! Every other reading is taken from the same product. `floor(10 × p / 2^64)` is
//! the time in 10 ns units, and since `floor(floor(10 x) / 10) = floor(x)`, a
//! 100 MHz counter and the guest's page can never tell different times.
//!
//! A new line through a given moment ([`ReferenceClock::with_frequency`],
//! [`ReferenceClock::started`]) can be moved in whole ticks only, because `offset`
//! is an integer: its fraction at that moment is what `tsc × scale` makes it. We
//! take the lowest line that is not behind the old one *including the fraction*,
//! so neither unit ever steps back, and a change costs less than one tick forward.

use std::fmt;
use std::ops::RangeInclusive;

/// Ticks of the reference clock in one second.
pub const TICKS_PER_SECOND: u64 = 10_000_000;

/// TSC frequencies that [`ReferenceClock`] can represent, in Hz.
///
/// At and below 10 MHz `scale` does not fit 64 bits; above 100 GHz its rounding
/// error would approach 1e-15. No x86 CPU with an invariant TSC lies outside, so
/// we refuse such a frequency instead of publishing a page that is never valid.
pub const SUPPORTED_TSC_HZ: RangeInclusive<u64> = 10_000_001..=100_000_000_000;

/// Reference time in units of 100 ns since the partition was created.
///
/// Wraps after 58 000 years, as the guest's own 64-bit arithmetic does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticks100ns(pub u64);

impl Ticks100ns {
    /// This time plus `ticks` (100 ns each), or the end of time.
    pub const fn saturating_add(self, ticks: u64) -> Self {
        Self(self.0.saturating_add(ticks))
    }

    /// Ticks (100 ns each) that passed since `earlier`; 0 if it is in the future.
    pub const fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }

    /// This time in nanoseconds, saturating after 584 years.
    pub const fn as_ns(self) -> u64 {
        self.0.saturating_mul(100)
    }
}

impl fmt::Display for Ticks100ns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:07} s", self.0 / TICKS_PER_SECOND, self.0 % TICKS_PER_SECOND)
    }
}

/// A TSC frequency outside [`SUPPORTED_TSC_HZ`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnsupportedFrequency {
    /// The frequency asked for, in Hz.
    pub tsc_hz: u64,
}

impl fmt::Display for UnsupportedFrequency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "TSC frequency {} Hz cannot drive the reference clock: it must lie between {} and {} Hz",
            self.tsc_hz,
            SUPPORTED_TSC_HZ.start(),
            SUPPORTED_TSC_HZ.end()
        )
    }
}

impl std::error::Error for UnsupportedFrequency {}

/// The line from a TSC value to reference time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReferenceClock {
    tsc_hz: u64,
    scale: u64,
    offset: i64,
}

/// A reading with its fraction: `ticks` and `fraction` / 2^64 of a tick.
#[derive(Clone, Copy)]
struct Reading {
    ticks: u64,
    fraction: u64,
}

impl ReferenceClock {
    /// A clock that reads 0 when the TSC is `tsc` (below 2^63) and runs at
    /// 10^7 / `tsc_hz` ticks per cycle.
    pub fn starting_at(tsc_hz: u64, tsc: u64) -> Result<Self, UnsupportedFrequency> {
        Ok(Self::through(tsc_hz, scale(tsc_hz)?, tsc, Reading { ticks: 0, fraction: 0 }))
    }

    /// The clock with exactly this `offset` (100 ns), for restoring a saved one.
    pub fn with_offset(tsc_hz: u64, offset: i64) -> Result<Self, UnsupportedFrequency> {
        Ok(Self { tsc_hz, scale: scale(tsc_hz)?, offset })
    }

    /// The TSC frequency in Hz.
    pub const fn tsc_hz(&self) -> u64 {
        self.tsc_hz
    }

    /// Ticks per TSC cycle, in units of 2^-64.
    pub const fn scale(&self) -> u64 {
        self.scale
    }

    /// The tick at TSC 0.
    pub const fn offset(&self) -> i64 {
        self.offset
    }

    /// Reference time at `tsc`: the guest's formula to the bit, wrapping included.
    #[inline]
    pub const fn ticks(&self, tsc: u64) -> Ticks100ns {
        Ticks100ns(self.reading(tsc).ticks)
    }

    /// Reference time at `tsc` in units of 10 ns.
    ///
    /// Always `ticks × 10` plus a digit 0–9, modulo 2^64; so `ticks_10ns / 10` is
    /// `ticks` until the finer counter wraps, after 5 800 years.
    #[inline]
    pub const fn ticks_10ns(&self, tsc: u64) -> u64 {
        let Reading { ticks, fraction } = self.reading(tsc);
        let digit = (fraction as u128 * 10) >> 64;
        ticks.wrapping_mul(10).wrapping_add(digit as u64)
    }

    /// The smallest TSC at which the clock shows `ticks` or later; 0 if it always
    /// has, `u64::MAX` if it never will.
    pub const fn tsc_at(&self, ticks: Ticks100ns) -> u64 {
        first_tsc(ticks.0 as i128 - self.offset as i128, self.scale as u128)
    }

    /// The smallest TSC at which [`Self::ticks_10ns`] shows `ticks_10ns` or later,
    /// with the same limits as [`Self::tsc_at`].
    pub const fn tsc_at_10ns(&self, ticks_10ns: u64) -> u64 {
        first_tsc(ticks_10ns as i128 - 10 * self.offset as i128, 10 * self.scale as u128)
    }

    /// The clock that goes on from `at_tsc` at `tsc_hz`: there it shows the same
    /// time, moved forward by less than one tick (see the module's head).
    ///
    /// A reader that still holds the old clock shortly after `at_tsc` may be ahead
    /// of one that has the new; see [`Self::with_frequency_within`].
    pub fn with_frequency(&self, at_tsc: u64, tsc_hz: u64) -> Result<Self, UnsupportedFrequency> {
        self.with_frequency_within(at_tsc..=at_tsc, tsc_hz)
    }

    /// The clock at `tsc_hz` that is nowhere in `handover` behind this one.
    ///
    /// `handover` is the span of TSC values at which some reader may have this
    /// clock and another the new one. The lines are straight, so a new line that is
    /// not behind at either end is not behind in between: whoever reads whichever
    /// clock in whatever order sees no step back. The price is a step forward of
    /// less than one tick plus the two rates' difference over the span.
    pub fn with_frequency_within(
        &self,
        handover: RangeInclusive<u64>,
        tsc_hz: u64,
    ) -> Result<Self, UnsupportedFrequency> {
        let scale = scale(tsc_hz)?;
        // The slower line falls behind to the right, the faster one to the left.
        let tsc = if scale < self.scale { *handover.end() } else { *handover.start() };
        Ok(Self::through(tsc_hz, scale, tsc, self.reading(tsc)))
    }

    /// The clock that stands still from `at_tsc` on: whatever the TSC, it shows what
    /// this one showed there, moved forward by less than one tick.
    pub const fn stopped(&self, at_tsc: u64) -> Self {
        Self::through(self.tsc_hz, 0, at_tsc, self.reading(at_tsc))
    }

    /// The clock that goes on from `at_tsc` at its frequency: there it shows what this
    /// one shows, moved forward by less than one tick.
    pub const fn started(&self, at_tsc: u64) -> Self {
        let scale = ticks_per_cycle(self.tsc_hz);
        Self::through(self.tsc_hz, scale, at_tsc, self.reading(at_tsc))
    }

    /// Whether it stands still.
    pub const fn is_stopped(&self) -> bool {
        self.scale == 0
    }

    /// The words of the clock, in a form that atomics can hold.
    pub(crate) const fn to_words(self) -> [u64; 3] {
        [self.tsc_hz, self.scale, self.offset as u64]
    }

    /// The inverse of [`Self::to_words`]; any three words make a clock that is safe
    /// to read, if not a sensible one.
    pub(crate) const fn from_words([tsc_hz, scale, offset]: [u64; 3]) -> Self {
        Self { tsc_hz, scale, offset: offset as i64 }
    }

    #[inline]
    const fn reading(&self, tsc: u64) -> Reading {
        let product = tsc as u128 * self.scale as u128;
        Reading {
            ticks: ((product >> 64) as u64).wrapping_add(self.offset as u64),
            fraction: product as u64,
        }
    }

    /// The lowest line of slope `scale` that at `tsc` is not behind `reading`.
    const fn through(tsc_hz: u64, scale: u64, tsc: u64, reading: Reading) -> Self {
        let at = Self { tsc_hz, scale, offset: 0 }.reading(tsc);
        let behind = (at.fraction < reading.fraction) as u64;
        let offset = reading.ticks.wrapping_sub(at.ticks).wrapping_add(behind) as i64;
        Self { tsc_hz, scale, offset }
    }
}

fn scale(tsc_hz: u64) -> Result<u64, UnsupportedFrequency> {
    if SUPPORTED_TSC_HZ.contains(&tsc_hz) {
        Ok(ticks_per_cycle(tsc_hz))
    } else {
        Err(UnsupportedFrequency { tsc_hz })
    }
}

/// `scale` of a supported frequency: below 2^64 because `tsc_hz` > 10^7.
const fn ticks_per_cycle(tsc_hz: u64) -> u64 {
    (((TICKS_PER_SECOND as u128) << 64) / tsc_hz as u128) as u64
}

/// The smallest TSC with `tsc × rate / 2^64 ≥ units`, where `rate` < 2^68.
const fn first_tsc(units: i128, rate: u128) -> u64 {
    if units <= 0 {
        return 0;
    }
    let units = units as u128;
    if units >= rate {
        return u64::MAX; // units × 2^64 / rate is 2^64 or more
    }
    // ceil(units × 2^64 / rate) in two steps of 32 bits: units < rate < 2^68, so
    // neither shift overflows 128 bits.
    let (high, rest) = ((units << 32) / rate, (units << 32) % rate);
    let (low, rest) = ((rest << 32) / rate, (rest << 32) % rate);
    let floor = ((high << 32) | low) as u64;
    floor.saturating_add((rest != 0) as u64)
}

#[cfg(test)]
mod tests;
