//! The deadlines of all timers that one thread serves: many publish, one sleeps.
//!
//! Publishing is a store and, unless the deadline is earlier than the moment at
//! which the thread means to wake up, nothing else: no lock and no system call.
//!
//! The race to win is Dekker's. The publisher stores its deadline and then looks
//! how long the thread sleeps; the thread says how long it sleeps and then looks at
//! the deadlines once more. With a full fence between the two steps on either side
//! at least one of them sees the other, so an earlier deadline is never slept over.

use crate::sync::{
    AtomicU64,
    Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst},
    fence,
};

/// No deadline.
pub const NEVER: u64 = u64::MAX;

/// Said by a thread that is at work and looks at every deadline before it sleeps.
const AWAKE: u64 = 0;

/// A word with a cache line, and the line that is fetched along with it, to itself.
#[derive(Debug)]
#[repr(align(128))]
struct Padded(AtomicU64);

/// Deadlines in one unit of the caller's choice, later ones larger.
#[derive(Debug)]
pub struct Deadlines {
    slots: Box<[Padded]>,
    sleeping_until: Padded,
}

impl Deadlines {
    /// This many slots without a deadline, and a thread at work.
    pub fn new(slots: usize) -> Self {
        Self {
            slots: (0..slots).map(|_| Padded(AtomicU64::new(NEVER))).collect(),
            sleeping_until: Padded(AtomicU64::new(AWAKE)),
        }
    }

    /// Number of slots.
    #[allow(clippy::len_without_is_empty)] // no slots is no special case
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Sets one slot's deadline in place of its last one. `true` if the thread
    /// sleeps beyond it and must be woken; of several publishers, the one that
    /// moved the moment is told so.
    ///
    /// Whatever the deadline belongs to must have been changed before, and
    /// publications of one slot must be in the order of those changes: hold the
    /// lock that guards it.
    #[inline]
    pub fn publish(&self, slot: usize, deadline: u64) -> bool {
        self.slots[slot].0.store(deadline, Release);
        fence(SeqCst);
        deadline < self.sleeping_until.0.load(Relaxed)
            && self.sleeping_until.0.fetch_min(deadline, AcqRel) > deadline
    }

    /// The thread is at work again: nobody needs to wake it.
    pub fn work(&self) {
        self.sleeping_until.0.store(AWAKE, Release);
    }

    /// Takes every deadline that is not after `now`, and passes its slot on. Each
    /// publication is taken once at most, and not at all if another replaces it.
    pub fn take_due(&self, now: u64, mut due: impl FnMut(usize)) {
        for (index, slot) in self.slots.iter().enumerate() {
            let deadline = slot.0.load(Acquire);
            if deadline <= now
                && deadline != NEVER
                && slot.0.compare_exchange(deadline, NEVER, AcqRel, Relaxed).is_ok()
            {
                due(index);
            }
        }
    }

    /// The earliest deadline; [`NEVER`] if there is none.
    pub fn earliest(&self) -> u64 {
        self.slots.iter().map(|slot| slot.0.load(Acquire)).min().unwrap_or(NEVER)
    }

    /// The thread is about to sleep: returns until when. Every earlier deadline
    /// published from now on wakes it.
    pub fn sleep(&self) -> u64 {
        let until = self.earliest();
        self.sleeping_until.0.store(until, Release);
        fence(SeqCst);
        // Who did not see that store is seen now. Not later than what was said,
        // even if that deadline is gone: nobody wakes the thread for one after it.
        self.earliest().min(until)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn due(deadlines: &Deadlines, now: u64) -> Vec<usize> {
        let mut slots = vec![];
        deadlines.take_due(now, |slot| slots.push(slot));
        slots
    }

    #[test]
    fn a_deadline_is_taken_once_and_not_before_its_time() {
        let deadlines = Deadlines::new(3);
        deadlines.publish(0, 10);
        deadlines.publish(2, 20);
        assert_eq!(due(&deadlines, 9), []);
        assert_eq!(due(&deadlines, 10), [0]);
        assert_eq!(due(&deadlines, 19), []);
        deadlines.publish(2, NEVER);
        assert_eq!(due(&deadlines, NEVER), []);
    }

    #[test]
    fn only_an_earlier_deadline_wakes_and_only_a_sleeper() {
        let deadlines = Deadlines::new(3);
        assert!(!deadlines.publish(0, 100), "the thread is at work");
        assert_eq!(deadlines.sleep(), 100);
        assert!(!deadlines.publish(1, 100));
        assert!(!deadlines.publish(1, 200));
        assert!(deadlines.publish(1, 50));
        assert!(!deadlines.publish(2, 60), "the wake-up for 50 serves it too");
        assert!(deadlines.publish(2, 40));
        deadlines.work();
        assert!(!deadlines.publish(2, 1));
        assert_eq!(deadlines.earliest(), 1);
    }

    #[test]
    fn nothing_to_do_is_slept_through_until_something_comes() {
        let deadlines = Deadlines::new(1);
        assert_eq!(deadlines.sleep(), NEVER);
        assert!(deadlines.publish(0, u64::MAX - 1));
    }
}

#[cfg(all(test, loom))]
mod loom_model {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    /// Two publishers against a thread that falls asleep: it either sleeps no longer
    /// than the earliest deadline or somebody wakes it.
    #[test]
    fn loom_no_deadline_is_slept_over() {
        loom::model(|| {
            let deadlines = Arc::new(Deadlines::new(2));
            let publishers: Vec<_> = [(0, 30), (1, 20)]
                .map(|(slot, deadline)| {
                    let deadlines = deadlines.clone();
                    thread::spawn(move || deadlines.publish(slot, deadline))
                })
                .into_iter()
                .collect();
            let until = deadlines.sleep();
            let woken = publishers.into_iter().map(|p| p.join().unwrap()).fold(false, |a, b| a | b);
            assert!(until <= 20 || woken, "sleeps until {until}");
        });
    }

    /// The deadline that the thread means to sleep for is put off just then.
    #[test]
    fn loom_a_deadline_put_off_is_not_slept_over() {
        loom::model(|| {
            let deadlines = Arc::new(Deadlines::new(1));
            deadlines.publish(0, 10);
            let publisher = {
                let deadlines = deadlines.clone();
                thread::spawn(move || deadlines.publish(0, NEVER) | deadlines.publish(0, 20))
            };
            let until = deadlines.sleep();
            let woken = publisher.join().unwrap();
            assert!(until <= 20 || woken, "sleeps until {until}");
        });
    }

    /// A re-arm and a cancellation against the thread that takes what is due: no
    /// publication is taken twice, and the last one is taken or still there.
    #[test]
    fn loom_a_deadline_is_taken_or_left_but_never_lost() {
        loom::model(|| {
            let deadlines = Arc::new(Deadlines::new(1));
            deadlines.publish(0, 10);
            let publisher = {
                let deadlines = deadlines.clone();
                thread::spawn(move || {
                    deadlines.publish(0, NEVER);
                    deadlines.publish(0, 20);
                })
            };
            let mut taken = 0;
            deadlines.work();
            deadlines.take_due(20, |_| taken += 1);
            deadlines.take_due(20, |_| taken += 1);
            publisher.join().unwrap();
            deadlines.take_due(20, |_| taken += 1);
            assert!((1..=2).contains(&taken), "{taken}");
            assert_eq!(deadlines.earliest(), NEVER);
        });
    }
}
