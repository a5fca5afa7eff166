//! One housekeeping thread and the slots that it serves.

use super::{Tally, Timers};
use devices::clock::Clock;
use devices::deadlines::{Deadlines, NEVER};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, Thread};
use std::time::Duration;

use crate::pinning;

/// The clock counts as standing still after this many equal readings: each comes
/// after a sleep, or more than the clock's 10 ns of work.
pub(super) const STANDING: u32 = 64;

/// How long the thread spins after a deadline, in times of that before it: the interrupt
/// has to arrive and its handler to come to the next arming. With 50 µs, 96 % of a slow
/// host's timers need one wake-up instead of two.
const LINGER: u64 = 4;

/// How much sooner a thread that polls wakes than its poll begins: the host wakes it
/// late, and a poll that begins after the deadline is none. Follows the lateness that
/// 15 of 16 wake-ups stay below.
#[derive(Debug)]
struct Lead {
    now_10ns: u64,
}

impl Default for Lead {
    /// 100 µs, as on a slow host: too long costs some spinning, too short the first
    /// deadlines.
    fn default() -> Self {
        Self { now_10ns: 10_000 }
    }
}

impl Lead {
    const STEP_10NS: u64 = 200;
    /// Where wake-ups are later than this, spinning does not pay.
    const MOST_10NS: u64 = 50_000;

    /// How long before a deadline the thread wakes to poll for `poll_10ns`; without
    /// polling it sleeps until the deadline.
    fn ahead(&self, poll_10ns: u64) -> u64 {
        if poll_10ns == 0 { 0 } else { poll_10ns.saturating_add(self.now_10ns) }
    }

    fn learn(&mut self, late_10ns: u64) {
        self.now_10ns = if late_10ns > self.now_10ns {
            (self.now_10ns + 15 * Self::STEP_10NS).min(Self::MOST_10NS)
        } else {
            self.now_10ns.saturating_sub(Self::STEP_10NS)
        };
    }
}

/// What the thread and the publishers share.
#[derive(Debug)]
pub(super) struct Desk {
    /// The thread's CPU, if it has one.
    pub cpu: Option<u32>,
    /// When its slots want it.
    pub deadlines: Deadlines,
    thread: OnceLock<Thread>,
    closed: AtomicBool,
    look_again: AtomicBool,
    wakeups: AtomicU64,
    calls: AtomicU64,
    due: AtomicU64,
}

impl Desk {
    pub fn new(cpu: Option<u32>, slots: usize) -> Self {
        Self {
            cpu,
            deadlines: Deadlines::new(slots),
            thread: OnceLock::new(),
            closed: AtomicBool::new(false),
            look_again: AtomicBool::new(false),
            wakeups: AtomicU64::new(0),
            calls: AtomicU64::new(0),
            due: AtomicU64::new(0),
        }
    }

    /// Tells who sits here. Before this nobody can be woken, and nobody sleeps long:
    /// the caller wakes the thread once.
    pub fn seat(&self, thread: Thread) {
        // A desk is seated once.
        let _ = self.thread.set(thread);
        self.unpark();
    }

    /// Wakes the thread for an earlier deadline.
    #[cold]
    pub fn wake(&self) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.unpark();
    }

    fn unpark(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }

    /// Has every slot looked at anew.
    pub fn look_again(&self) {
        self.look_again.store(true, Ordering::Release);
        self.unpark();
    }

    /// Ends the thread.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.unpark();
    }

    pub fn tally(&self) -> Tally {
        let count = |cell: &AtomicU64| cell.load(Ordering::Relaxed);
        Tally {
            cpu: self.cpu,
            wakeups: count(&self.wakeups),
            calls: count(&self.calls),
            due: count(&self.due),
        }
    }

    /// The thread's life. `timers` has one entry a slot.
    ///
    /// The clock is read anew after each sleep, so that a clock that runs slower
    /// than the host's never makes a timer early. While it stands still, so does the
    /// thread, until [`Desk::look_again`].
    ///
    /// A guest mostly arms its next timer when the last one has fired: where it polls,
    /// the thread does so after a deadline, too, and nobody needs to wake it.
    pub fn serve(&self, clock: &dyn Clock, timers: &[Option<Arc<dyn Timers>>], poll: Duration) {
        pinning::refuse_timer_slack();
        let poll = u64::try_from(poll.as_nanos() / 10).unwrap_or(u64::MAX);
        let linger = poll.saturating_mul(LINGER);
        let mut lead = Lead::default();
        let (mut last, mut unmoved, mut linger_until) = (0, 0, 0);
        while !self.closed.load(Ordering::Acquire) {
            self.deadlines.work();
            if self.look_again.swap(false, Ordering::AcqRel) {
                timers.iter().flatten().for_each(|timers| timers.expire());
            }
            let now = clock.now_10ns();
            self.deadlines.take_due(now, |slot| {
                self.due.fetch_add(1, Ordering::Relaxed);
                linger_until = now.saturating_add(linger);
                if let Some(timers) = &timers[slot] {
                    timers.expire();
                }
            });
            unmoved = if now == last { unmoved + 1 } else { 0 };
            last = now;
            let ahead = lead.ahead(poll);
            let near = self.deadlines.earliest().saturating_sub(ahead) <= now;
            if unmoved < STANDING && (near || now < linger_until) {
                std::hint::spin_loop();
                continue;
            }
            let until = self.deadlines.sleep();
            let wake_at = until.saturating_sub(ahead);
            let left = wake_at.saturating_sub(clock.now_10ns());
            if until == NEVER || unmoved >= STANDING {
                thread::park();
            } else {
                thread::park_timeout(Duration::from_nanos(left.saturating_mul(10)));
                if poll > 0
                    && let Some(late) = clock.now_10ns().checked_sub(wake_at)
                {
                    lead.learn(late);
                }
            }
            self.wakeups.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lead_follows_what_most_wake_ups_stay_below() {
        let mut lead = Lead::default();
        // 60 us late, and every 40th time 2 ms.
        for n in 0..10_000 {
            lead.learn(if n % 40 == 0 { 200_000 } else { 6_000 });
        }
        assert!((5_000..20_000).contains(&lead.now_10ns), "{lead:?}");
        (0..1_000).for_each(|_| lead.learn(u64::MAX));
        assert_eq!(lead.now_10ns, Lead::MOST_10NS);
        (0..1_000).for_each(|_| lead.learn(0));
        assert_eq!(lead.now_10ns, 0);
    }

    #[test]
    fn a_thread_that_does_not_poll_sleeps_until_the_deadline() {
        let lead = Lead::default();
        assert_eq!(lead.ahead(0), 0);
        assert_eq!(lead.ahead(5_000), 5_000 + lead.now_10ns);
    }
}
