//! One synthetic timer in direct mode, as pure state (TLFS, "Synthetic Timers").
//!
//! A one-shot timer fires when reference time reaches COUNT, at once if that is
//! past, and disables itself. A periodic one fires every COUNT from the moment it
//! was enabled. Either fires through a vector of the local APIC; a timer that asks
//! for a SynIC message instead can never deliver it, so it cannot be enabled: its
//! enable bit stays 0, which is what the TLFS prescribes for a message to SINT 0.
//!
//! Never early is the one guarantee the TLFS gives, and ours. Late by whole
//! periods, a periodic timer fires once and goes on with the next period that is
//! still to come: the phase is kept, missed periods are not replayed. That is the
//! lazy behaviour, which the TLFS also grants timers that are not marked lazy once
//! many periods were missed; the lazy bit is stored and changes nothing.
//!
//! Config, count and due time change together in one `&mut self` call, so whoever
//! holds the timer sees all of an operation or nothing of it.

use std::fmt;

use crate::reference::Ticks100ns;

/// Timer fires when due.
pub const ENABLE: u64 = 1 << 0;
/// COUNT is a period, not a time.
pub const PERIODIC: u64 = 1 << 1;
/// Missed periods may be skipped.
pub const LAZY: u64 = 1 << 2;
/// Writing a non-zero COUNT sets [`ENABLE`].
pub const AUTO_ENABLE: u64 = 1 << 3;
/// Fire through [`VECTOR_SHIFT`]'s vector, not through a SynIC message.
pub const DIRECT: u64 = 1 << 12;
/// Position of the 8-bit APIC vector.
pub const VECTOR_SHIFT: u32 = 4;

/// Bits that must be written as 0: 63:20 and 15:13. The SINT, 19:16, is stored.
const RESERVED: u64 = !0xF_1FFF;

/// The local APIC cannot deliver the vectors below (SDM Vol. 3A, "Valid Interrupt
/// Vectors").
const FIRST_VALID_VECTOR: u8 = 16;

/// How soon after one expiration a timer with a shorter period than this may fire
/// again, in 100 ns.
///
/// A guest may ask for a period of 100 ns at the price of one write; we would pay
/// for it with a thread that does nothing else. Such a timer skips expirations but
/// keeps its phase. 50 µs is a quarter of what KVM's LAPIC timer allows.
pub const MIN_PERIOD: u64 = 500;

/// A CONFIG value that the guest may not write: a reserved bit, or direct mode with
/// a vector below 16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidConfig(
    /// The value refused.
    pub u64,
);

impl fmt::Display for InvalidConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "synthetic timer configuration {:#x} is not allowed", self.0)
    }
}

impl std::error::Error for InvalidConfig {}

/// The state of one synthetic timer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stimer {
    /// CONFIG, as the guest reads it back.
    pub config: u64,
    /// COUNT: the time (one-shot) or period (periodic), in 100 ns.
    pub count: u64,
    /// When the timer fires next; `None` while stopped.
    pub due: Option<Ticks100ns>,
}

impl Stimer {
    /// The guest writes CONFIG at `now`: the timer starts anew or stops.
    pub fn write_config(&mut self, value: u64, now: Ticks100ns) -> Result<(), InvalidConfig> {
        let direct = value & DIRECT != 0;
        if value & RESERVED != 0 || (direct && vector(value) < FIRST_VALID_VECTOR) {
            return Err(InvalidConfig(value));
        }
        self.config = value;
        self.restart(now);
        Ok(())
    }

    /// The guest writes COUNT at `now`: 0 disables the timer, anything else starts
    /// it if it is enabled or enables itself.
    pub fn write_count(&mut self, value: u64, now: Ticks100ns) {
        self.count = value;
        if value == 0 {
            self.config &= !ENABLE;
        } else if self.config & AUTO_ENABLE != 0 {
            self.config |= ENABLE;
        }
        self.restart(now);
    }

    /// When the timer is to fire; may be past. `None` while stopped.
    pub const fn due(&self) -> Option<Ticks100ns> {
        self.due
    }

    /// If the timer is due at `now`, the vector to raise, and the timer goes on to
    /// its next period or disables itself.
    pub fn expire(&mut self, now: Ticks100ns) -> Option<u8> {
        let due = self.due.filter(|&due| due <= now)?;
        if self.is_periodic() {
            self.due = next_period(due, self.count, now);
        } else {
            self.due = None;
            self.config &= !ENABLE;
        }
        Some(vector(self.config))
    }

    fn is_periodic(&self) -> bool {
        self.config & PERIODIC != 0
    }

    fn restart(&mut self, now: Ticks100ns) {
        if self.config & DIRECT == 0 {
            self.config &= !ENABLE;
        }
        self.due = if self.config & ENABLE == 0 || self.count == 0 {
            None
        } else if self.is_periodic() {
            next_period(now, self.count, now)
        } else {
            Some(Ticks100ns(self.count))
        };
    }
}

/// The first `from + k × period` after `now` that is at least [`MIN_PERIOD`] away
/// from it or, for a longer period, the very next one. `None` if there is no period
/// or no time left.
fn next_period(from: Ticks100ns, period: u64, now: Ticks100ns) -> Option<Ticks100ns> {
    let not_before = if period < MIN_PERIOD { now.0.checked_add(MIN_PERIOD - 1)? } else { now.0 };
    let missed = not_before.checked_sub(from.0)?.checked_div(period)?;
    let ahead = missed.checked_add(1)?.checked_mul(period)?;
    Some(Ticks100ns(from.0.checked_add(ahead)?))
}

fn vector(config: u64) -> u8 {
    (config >> VECTOR_SHIFT) as u8
}

#[cfg(test)]
mod tests;
