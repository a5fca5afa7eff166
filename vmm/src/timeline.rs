//! The one time source: every clock that a guest can read comes from here.
//!
//! The reference clock is a line over the *guest's* TSC, because the guest
//! evaluates the same line through the TSC page. All vCPUs have the same TSC
//! offset (see `tsc_offset` in [`crate::vcpu`]), so one line serves them all.
//!
//! The line is kept in a latch. Whoever reads the time never waits, not even for
//! the one thread that moves to another line (the main thread: discipline, pause
//! and the control socket all run there).
//!
//! # Why a change of rate never shows a step back
//!
//! A reader takes the TSC while the latch vouches for its line. So there is one
//! moment, the switch, up to which all readings are by the old line and after
//! which all are by the new; it suffices that the new line is not behind the old
//! one there. When the switch will be is not known beforehand, for the kernel may
//! take the CPU from us just before; so the new line is laid such that it is not
//! behind for [`HANDOVER_S`] to come. A change is at most [`MOST_STEP_PPB`], hence
//! that costs less than a tick of time forward, and being held up for longer by S
//! seconds (seen afterwards, and told) could cost S × 10⁻⁷ s of monotonicity.
//! The page is not valid across the switch: see
//! [`crate::hyperv::HyperV::around_change`].

use crate::error::{Error, Result};
use crate::tsc;
use pvclock::latch::Latch;
use pvclock::reference::{ReferenceClock, Ticks100ns};

/// How far ahead a new line is kept from being behind the old one, in seconds.
pub const HANDOVER_S: u64 = 1;

/// The most that one change moves the rate, in parts per 10⁹: over
/// [`HANDOVER_S`], one tick.
pub const MOST_STEP_PPB: u64 = 100;

/// The most that the rate may differ from what KVM says, in parts per 10⁹.
pub const MOST_OFF_PPB: u64 = 100_000;

/// Reference time of one machine.
#[derive(Debug)]
pub struct Timeline {
    latch: Latch,
    /// What the guest's TSC is ahead of the host's, modulo 2⁶⁴.
    tsc_offset: u64,
    /// The TSC's frequency as KVM and the frequency MSR tell it, in Hz.
    nominal_hz: u64,
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
        Ok(Self { latch: Latch::new(clock), tsc_offset, nominal_hz: tsc_hz })
    }

    /// The line that the TSC page publishes.
    pub fn clock(&self) -> ReferenceClock {
        self.latch.read()
    }

    /// What the guest's TSC is ahead of the host's, modulo 2⁶⁴.
    pub fn tsc_offset(&self) -> u64 {
        self.tsc_offset
    }

    /// The TSC's frequency in Hz that the guest was told, whatever the discipline
    /// has found since.
    pub fn nominal_hz(&self) -> u64 {
        self.nominal_hz
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
        let clock = self.clock();
        let ticks = clock.ticks(tsc).0;
        if ticks < u64::MAX / 10 { clock.ticks_10ns(tsc) + 1 } else { u64::MAX }
    }

    /// Reference time in units of 100 ns: the reference counter.
    pub fn now(&self) -> Ticks100ns {
        self.latch.sample(|clock| clock.ticks(self.guest_tsc()))
    }

    /// Lets time stand still. For parked vCPUs only: one that reads while the line
    /// is switched could see a little more than the time that is kept.
    pub fn stop(&self) {
        self.latch.update(|clock| clock.stopped(self.guest_tsc()));
    }

    /// Lets time go on from where it stopped.
    pub fn start_again(&self) {
        self.latch.update(|clock| clock.started(self.guest_tsc()));
    }

    /// Moves the rate towards a TSC frequency of `hz` as far as one change may, and
    /// returns the frequency that holds now. A stopped clock keeps its rate.
    pub fn steer(&self, hz: u64) -> u64 {
        let mut last = 0;
        let clock = self.latch.update(|clock| {
            if clock.is_stopped() {
                return clock;
            }
            let hz = within_ppb(hz, self.nominal_hz, MOST_OFF_PPB);
            let hz = within_ppb(hz, clock.tsc_hz(), MOST_STEP_PPB);
            let now = self.guest_tsc();
            last = now.saturating_add(HANDOVER_S * self.nominal_hz);
            clock.with_frequency_within(now..=last, hz).unwrap_or(clock)
        });
        if last != 0 && self.guest_tsc() > last {
            log::warn!(
                "the clock's rate changed with a delay of over {HANDOVER_S} s: this host is too \
                 busy, and the guest may have seen a step back of less than its delay × 10^-7"
            );
        }
        clock.tsc_hz()
    }
}

/// The frequency nearest to `hz` that is no more than `ppb` parts per 10⁹ away
/// from `from`.
fn within_ppb(hz: u64, from: u64, ppb: u64) -> u64 {
    let most = (u128::from(from) * u128::from(ppb) / 1_000_000_000) as u64;
    hz.clamp(from.saturating_sub(most), from.saturating_add(most))
}

impl devices::clock::Clock for Timeline {
    fn now_10ns(&self) -> u64 {
        self.latch.sample(|clock| clock.ticks_10ns(self.guest_tsc()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use devices::clock::Clock;

    const HZ: u64 = 2_445_430_000;

    #[test]
    fn a_stopped_clock_stands_and_goes_on_from_there() {
        let timeline = Timeline::start(HZ, 0).unwrap();
        let before = timeline.now();
        timeline.stop();
        let stopped = timeline.now();
        assert!(stopped >= before);
        assert_eq!(timeline.steer(HZ + 1), HZ, "a stopped clock keeps its rate");
        assert_eq!(timeline.now(), stopped);
        let passed = timeline.guest_tsc();
        timeline.start_again();
        assert!(timeline.now() >= stopped);
        let most = timeline.clock().ticks(timeline.guest_tsc()).since(stopped);
        let cycles = u128::from(timeline.guest_tsc() - passed);
        assert!(u128::from(most) <= cycles * 10_000_000 / u128::from(HZ) + 2);
    }

    #[test]
    fn the_rate_is_bounded_by_step_and_in_all() {
        let timeline = Timeline::start(HZ, 0).unwrap();
        assert_eq!(timeline.steer(HZ + 100), HZ + 100);
        assert_eq!(timeline.steer(u64::MAX), HZ + 100 + 244);
        assert_eq!(timeline.steer(0), HZ + 100);
        for _ in 0..2000 {
            timeline.steer(0);
        }
        assert_eq!(timeline.clock().tsc_hz(), HZ - HZ / 10_000);
        assert_eq!(timeline.nominal_hz(), HZ);
    }

    /// Readers on two threads while the rate swings at full speed by the largest
    /// step: no reading is behind one that was taken before it, by either thread.
    #[test]
    fn readers_see_no_step_back_while_the_rate_swings() {
        use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
        let timeline = Timeline::start(HZ, 0).unwrap();
        let (floor, done) = (AtomicU64::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !done.load(Ordering::Relaxed) {
                        let floor_before = floor.load(Ordering::SeqCst);
                        let now = timeline.now_10ns();
                        assert!(now >= floor_before, "{now} after {floor_before}");
                        floor.fetch_max(now, Ordering::SeqCst);
                    }
                });
            }
            for n in 0..100_000 {
                timeline.steer(if n % 2 == 0 { HZ + 244 } else { HZ });
            }
            done.store(true, Ordering::Relaxed);
        });
    }
}
