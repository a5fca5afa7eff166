//! The one time source: every clock that a guest can read comes from here.
//!
//! The reference clock is a line over the *guest's* TSC, because the guest
//! evaluates the same line through the TSC page. All vCPUs have the same TSC
//! offset (see `tsc_offset` in [`crate::vcpu`]), so one line serves them all.

use crate::error::{Error, Result};
use crate::tsc;
use pvclock::reference::{ReferenceClock, Ticks100ns};

/// Reference time of one machine.
#[derive(Debug)]
pub struct Timeline {
    clock: ReferenceClock,
    /// What the guest's TSC is ahead of the host's, modulo 2⁶⁴.
    tsc_offset: u64,
}

impl Timeline {
    /// Time 0 is now.
    ///
    /// # Errors
    /// A TSC whose frequency no reference clock can carry.
    pub fn start(tsc_hz: u64, tsc_offset: u64) -> Result<Self> {
        let now = tsc::read_ordered().wrapping_add(tsc_offset);
        let clock = ReferenceClock::starting_at(tsc_hz, now)
            .map_err(|e| Error::new(format!("this host's TSC does not do: {e}")))?;
        Ok(Self { clock, tsc_offset })
    }

    /// The line that the TSC page publishes.
    pub fn clock(&self) -> ReferenceClock {
        self.clock
    }

    /// What the guest's TSC is ahead of the host's, modulo 2⁶⁴.
    pub fn tsc_offset(&self) -> u64 {
        self.tsc_offset
    }

    /// The TSC as the guest would read it now.
    pub fn guest_tsc(&self) -> u64 {
        tsc::read_ordered().wrapping_add(self.tsc_offset)
    }

    /// The first moment, in units of 10 ns of reference time, at which the guest's
    /// TSC is at or past `tsc`; `u64::MAX` if that is beyond all time.
    ///
    /// `tsc` must not lie before the machine's start.
    pub fn first_10ns_after(&self, tsc: u64) -> u64 {
        let ticks = self.clock.ticks(tsc).0;
        if ticks < u64::MAX / 10 { self.clock.ticks_10ns(tsc) + 1 } else { u64::MAX }
    }

    /// Reference time in units of 100 ns: the reference counter.
    pub fn now(&self) -> Ticks100ns {
        self.clock.ticks(self.guest_tsc())
    }
}

impl devices::clock::Clock for Timeline {
    fn now_10ns(&self) -> u64 {
        self.clock.ticks_10ns(self.guest_tsc())
    }
}
