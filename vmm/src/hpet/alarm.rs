//! The timer thread: it sleeps until the HPET's next deadline.

use crate::lifecycle::{Lifecycle, State};
use crate::pinning;
use devices::clock::Clock;
use devices::hpet::TimerService;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A deadline, and the thread that waits for it.
pub struct Alarm {
    clock: Arc<dyn Clock>,
    state: Mutex<Waiting>,
    changed: Condvar,
    expiries: AtomicU64,
}

#[derive(Default)]
struct Waiting {
    /// Reference time in units of 10 ns.
    deadline: Option<u64>,
    /// What the thread sleeps for; `None` while it works.
    asleep: Option<Sleep>,
    stopping: bool,
}

/// How long a thread sleeps unless it is woken.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Sleep {
    Until(u64),
    Forever,
}

impl Alarm {
    /// No deadline yet. `clock` is the one that deadlines are told by.
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        Self {
            clock,
            state: Mutex::default(),
            changed: Condvar::new(),
            expiries: AtomicU64::new(0),
        }
    }

    /// How often a deadline came.
    pub fn expiries(&self) -> u64 {
        self.expiries.load(Ordering::Relaxed)
    }

    /// Calls `expire` at each deadline until [`Alarm::stop`]; the thread's work.
    pub fn run(&self, lifecycle: &Lifecycle, expire: impl Fn()) {
        pinning::refuse_timer_slack();
        let mut state = self.lock();
        while !state.stopping {
            // Reference time stands still in a paused machine, and so do we.
            if lifecycle.state() == State::Paused {
                drop(state);
                lifecycle.wait_while_paused();
                state = self.lock();
                continue;
            }
            let now = self.clock.now_10ns();
            match state.deadline {
                Some(deadline) if deadline <= now => {
                    state.deadline = None;
                    drop(state);
                    self.expiries.fetch_add(1, Ordering::Relaxed);
                    expire();
                    state = self.lock();
                }
                Some(deadline) => state = self.sleep(state, Sleep::Until(deadline), deadline - now),
                None => state = self.sleep(state, Sleep::Forever, u64::MAX),
            }
        }
    }

    fn sleep<'a>(
        &self,
        mut state: MutexGuard<'a, Waiting>,
        sleep: Sleep,
        left_10ns: u64,
    ) -> MutexGuard<'a, Waiting> {
        state.asleep = Some(sleep);
        let mut state = match sleep {
            Sleep::Forever => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            Sleep::Until(_) => {
                // CLOCK_MONOTONIC, which may run a little slower or faster than the TSC: who
                // wakes too early sleeps again.
                let left = Duration::from_nanos(left_10ns.saturating_mul(10));
                let woken = self.changed.wait_timeout(state, left);
                woken.unwrap_or_else(PoisonError::into_inner).0
            }
        };
        state.asleep = None;
        state
    }

    /// Makes [`Alarm::run`] return.
    pub fn stop(&self) {
        self.lock().stopping = true;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl TimerService for Alarm {
    fn set_deadline(&self, deadline_10ns: Option<u64>) {
        let mut state = self.lock();
        state.deadline = deadline_10ns;
        // A later deadline, or none, is found when the thread wakes for the old one.
        let earlier = |sleep| deadline_10ns.is_some_and(|deadline| Sleep::Until(deadline) < sleep);
        if state.asleep.is_some_and(earlier) {
            drop(state);
            self.changed.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ending::Ending;
    use std::sync::mpsc;
    use std::time::Instant;

    struct Monotonic(Instant);

    impl Clock for Monotonic {
        fn now_10ns(&self) -> u64 {
            (self.0.elapsed().as_nanos() / 10) as u64
        }
    }

    /// Runs `test` with an alarm whose expiries are sent on a channel, as times.
    fn with_alarm(test: impl FnOnce(&Alarm, &Lifecycle, &mpsc::Receiver<u64>)) {
        let clock = Arc::new(Monotonic(Instant::now()));
        let alarm = Alarm::new(clock.clone());
        let lifecycle = Lifecycle::new(0).unwrap();
        lifecycle.resume();
        let (sender, expiries) = mpsc::channel();
        /// A failed test must not leave the thread waiting.
        struct Stop<'a>(&'a Alarm, &'a Lifecycle);
        impl Drop for Stop<'_> {
            fn drop(&mut self) {
                self.1.end(Ending::Quit);
                self.0.stop();
            }
        }
        std::thread::scope(|scope| {
            let _stop = Stop(&alarm, &lifecycle);
            scope.spawn(|| {
                alarm.run(&lifecycle, || {
                    let _ = sender.send(clock.now_10ns());
                })
            });
            test(&alarm, &lifecycle, &expiries);
        });
    }

    const MS: u64 = 100_000;
    const PATIENCE: Duration = Duration::from_secs(20);

    #[test]
    fn deadlines_come_once_and_never_early() {
        with_alarm(|alarm, _, expiries| {
            for _ in 0..20 {
                let deadline = alarm.clock.now_10ns() + MS;
                alarm.set_deadline(Some(deadline));
                assert!(expiries.recv_timeout(PATIENCE).unwrap() >= deadline);
            }
            assert_eq!(alarm.expiries(), 20);
        });
    }

    #[test]
    fn an_earlier_deadline_wakes_and_a_past_one_is_due() {
        with_alarm(|alarm, _, expiries| {
            alarm.set_deadline(Some(u64::MAX));
            alarm.set_deadline(Some(alarm.clock.now_10ns() + MS));
            expiries.recv_timeout(PATIENCE).unwrap();
            alarm.set_deadline(Some(0));
            expiries.recv_timeout(PATIENCE).unwrap();
        });
    }

    #[test]
    fn a_withdrawn_deadline_does_not_come() {
        with_alarm(|alarm, _, expiries| {
            alarm.set_deadline(Some(alarm.clock.now_10ns() + 20 * MS));
            alarm.set_deadline(None);
            assert!(expiries.recv_timeout(Duration::from_millis(60)).is_err());
        });
    }

    #[test]
    fn nothing_expires_in_a_paused_machine() {
        with_alarm(|alarm, lifecycle, expiries| {
            lifecycle.pause();
            alarm.set_deadline(Some(0));
            assert!(expiries.recv_timeout(Duration::from_millis(30)).is_err());
            lifecycle.resume();
            expiries.recv_timeout(PATIENCE).unwrap();
        });
    }
}
