//! The TSC's frequency, refined in the background against CLOCK_MONOTONIC_RAW.
//!
//! KVM tells it in whole kHz, up to 0.2 ppm off at 2.4 GHz, and what the kernel
//! calibrated at its boot may be further off. Every [`INTERVAL`] both clocks are
//! read at the same moment, within a bracket of some tens of ns; the frequency is
//! the slope from the oldest reading of the last five minutes to the newest, so its
//! error shrinks as the span grows. It corrects the rate alone: time that was lost
//! stays lost, and no reading ever steps. Nothing is touched while the difference
//! is within the measurement's own error or [`WORTH_PPB`], so a clock that is right
//! keeps its page. The frequency MSR keeps saying what the guest booted with.

use crate::error::{Error, Result};
use crate::events::watch;
use crate::lifecycle::State;
use crate::machine::Shared;
use crate::timeline::MOST_OFF_PPB;
use crate::tsc::Bracket;
use event_manager::{EventOps, EventSet, EventSubscriber, Events};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use vmm_sys_util::timerfd::TimerFd;

/// Time between two readings.
const INTERVAL: Duration = Duration::from_secs(2);
/// Readings kept: five minutes.
const MOST_READINGS: usize = 150;
/// A bracket this much wider than the tightest was interrupted.
const WIDEST: u64 = 4;
/// An estimate that may be further off is no reason to act, in parts per 10⁹.
const MOST_UNCERTAIN_PPB: f64 = 20.0;
/// Smaller differences stay, in parts per 10⁹.
pub const WORTH_PPB: f64 = 5.0;

/// What readings of both clocks say of the TSC's frequency.
#[derive(Debug)]
struct Estimator {
    nominal_hz: u64,
    readings: VecDeque<Bracket>,
}

/// A frequency, and how far off it may be.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Estimate {
    hz: f64,
    uncertainty_ppb: f64,
}

impl Estimator {
    fn new(nominal_hz: u64) -> Self {
        Self { nominal_hz, readings: VecDeque::new() }
    }

    /// Takes one more reading. Says nothing as long as there is too little to go by.
    fn add(&mut self, reading: Bracket) -> Option<Estimate> {
        let tightest = self.readings.iter().map(|r| r.width).min();
        if tightest.is_some_and(|tightest| reading.width > tightest.saturating_mul(WIDEST)) {
            return None;
        }
        self.readings.push_back(reading);
        if self.readings.len() > MOST_READINGS {
            self.readings.pop_front();
        }
        let oldest = self.readings.front()?;
        let cycles = reading.tsc.checked_sub(oldest.tsc)? as f64;
        let seconds = reading.raw_ns.checked_sub(oldest.raw_ns).filter(|ns| *ns > 0)? as f64 / 1e9;
        let estimate = Estimate {
            hz: cycles / seconds,
            uncertainty_ppb: (oldest.width + reading.width) as f64 / 2.0 / cycles * 1e9,
        };
        if estimate.off_ppb(self.nominal_hz).abs() > MOST_OFF_PPB as f64 {
            // One of the clocks stopped or jumped, as over a suspend of the host.
            log::debug!("TSC at {:.0} Hz? The readings so far are dropped", estimate.hz);
            self.readings.clear();
            return None;
        }
        Some(estimate).filter(|estimate| estimate.uncertainty_ppb <= MOST_UNCERTAIN_PPB)
    }
}

impl Estimate {
    /// How much higher this is than `hz`, in parts per 10⁹.
    fn off_ppb(&self, hz: u64) -> f64 {
        (self.hz / hz as f64 - 1.0) * 1e9
    }

    /// The frequency to steer to from `hz`, if that is worth it.
    fn correction(&self, hz: u64) -> Option<u64> {
        let worth = self.uncertainty_ppb.max(WORTH_PPB);
        (self.off_ppb(hz).abs() > worth).then(|| self.hz.round() as u64)
    }
}

/// Steers the machine's clock from the main loop.
pub struct Discipline {
    timer: Mutex<TimerFd>,
    estimator: Mutex<Estimator>,
    machine: Arc<Shared>,
}

impl Discipline {
    /// Reads both clocks now, and from then on every [`INTERVAL`].
    ///
    /// # Errors
    /// A host without a timer to spare.
    pub fn start(machine: Arc<Shared>) -> Result<Self> {
        let failed = |e| Error::new(format!("--clock-discipline: cannot set a timer ({e})"));
        let mut timer = TimerFd::new().map_err(failed)?;
        timer.reset(INTERVAL, Some(INTERVAL)).map_err(failed)?;
        let mut estimator = Estimator::new(machine.timeline.nominal_hz());
        estimator.add(Bracket::tightest());
        Ok(Self { timer: Mutex::new(timer), estimator: Mutex::new(estimator), machine })
    }
}

impl EventSubscriber for Discipline {
    fn process(&self, _: Events, _: &mut EventOps<'_>) {
        // Makes the descriptor unreadable until the next expiry.
        let _ = self.timer.lock().unwrap_or_else(PoisonError::into_inner).wait();
        let mut estimator = self.estimator.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(estimate) = estimator.add(Bracket::tightest()) else { return };
        let timeline = &self.machine.timeline;
        let now = timeline.clock().tsc_hz();
        if let Some(hz) = estimate.correction(now)
            && self.machine.lifecycle.state() == State::Running
        {
            let reached = self.machine.change_clock(|| timeline.steer(hz));
            log::debug!(
                "TSC: {now} Hz was {:.0} ppb off (± {:.0}); now {reached} Hz",
                -estimate.off_ppb(now),
                estimate.uncertainty_ppb
            );
        }
    }

    fn init(&self, ops: &mut EventOps<'_>) {
        let timer = self.timer.lock().unwrap_or_else(PoisonError::into_inner);
        watch(ops, "the clock's discipline", Events::new(&*timer, EventSet::IN));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOMINAL: u64 = 2_445_430_000;
    /// 160 ppb above what KVM says.
    const TRUE_HZ: f64 = 2_445_430_391.0;

    /// The reading `n` seconds after the start, the clock read at one end or the other
    /// of a bracket of `width` cycles.
    fn reading(n: u64, width: u64) -> Bracket {
        let tsc = (n as f64 * TRUE_HZ) as u64 + 1_000_000;
        let early = n.is_multiple_of(2);
        Bracket {
            tsc: if early { tsc - width / 2 } else { tsc + width / 2 },
            raw_ns: n * 1_000_000_000,
            width,
        }
    }

    #[test]
    fn it_finds_the_frequency_and_then_leaves_it_alone() {
        let mut estimator = Estimator::new(NOMINAL);
        assert_eq!(estimator.add(reading(0, 100)), None);
        let estimates: Vec<_> =
            (1..200).filter_map(|n| estimator.add(reading(2 * n + n % 2, 100))).collect();
        for estimate in &estimates {
            let error = (estimate.hz / TRUE_HZ - 1.0) * 1e9;
            assert!(error.abs() <= estimate.uncertainty_ppb + 0.1, "{error} {estimate:?}");
        }
        let hz = estimates[150].correction(NOMINAL).unwrap();
        assert!(hz.abs_diff(TRUE_HZ as u64) <= 1, "{hz}");
        assert_eq!(estimates[190].correction(hz), None);
        assert_eq!(estimator.readings.len(), MOST_READINGS);
    }

    #[test]
    fn an_interrupted_reading_is_not_used() {
        let mut estimator = Estimator::new(NOMINAL);
        estimator.add(reading(0, 100));
        assert_eq!(estimator.add(reading(100, 1_000_000)), None);
        assert_eq!(estimator.readings.len(), 1);
        assert!(estimator.add(reading(101, 120)).is_some());
    }

    #[test]
    fn too_short_a_span_is_no_reason_to_act() {
        let mut estimator = Estimator::new(NOMINAL);
        estimator.add(reading(0, 1000));
        assert_eq!(estimator.add(reading(2, 1000)), None, "204 ppb of uncertainty");
    }

    #[test]
    fn a_clock_that_jumped_starts_the_measurement_anew() {
        let mut estimator = Estimator::new(NOMINAL);
        estimator.add(reading(0, 100));
        // The host slept a minute: the TSC went on, the clock did not.
        let jumped = |n| Bracket { raw_ns: (n - 60) * 1_000_000_000, ..reading(n, 100) };
        assert_eq!(estimator.add(jumped(100)), None);
        assert!(estimator.readings.is_empty());
        assert_eq!(estimator.add(jumped(102)), None);
        let estimate = estimator.add(jumped(130)).unwrap();
        assert!((estimate.hz - TRUE_HZ).abs() < 10.0, "{estimate:?}");
    }
}
