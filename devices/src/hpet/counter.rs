//! The main counter, read by every vCPU at once.
//!
//! A sequence counter guards the pair (running, base). It is odd while a halt, a start or a write
//! is in flight: only then, or when one came between, is a reader sent to the device's lock. It
//! has to be: a halt that takes the time *t* undercuts every reader that took a later time and
//! has not heard of the halt. So the clock is read between two looks at the sequence, and the
//! writer makes it odd before it reads the clock.

#[cfg(loom)]
use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

use crate::clock::Clock;

/// What the counter shows at any time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CounterView {
    /// Whether the counter runs.
    pub running: bool,
    /// The value of a halted counter, or what a running one is ahead of reference time.
    pub base: u64,
}

impl CounterView {
    /// The counter's value, in ticks of 10 ns, at a reference time in units of 10 ns.
    pub fn at(self, now_10ns: u64) -> u64 {
        if self.running { self.base.wrapping_add(now_10ns) } else { self.base }
    }

    /// A counter that shows `value` at `now_10ns`.
    pub(super) fn showing(value: u64, running: bool, now_10ns: u64) -> Self {
        Self { running, base: if running { value.wrapping_sub(now_10ns) } else { value } }
    }
}

/// The counter as readers see it. Written under the device's lock only, and on a cache line of
/// its own, which that lock does not take from the readers.
#[derive(Debug)]
#[repr(align(64))]
pub struct Counter {
    sequence: AtomicU64,
    running: AtomicBool,
    base: AtomicU64,
}

impl Counter {
    pub fn new(view: CounterView) -> Self {
        let CounterView { running, base } = view;
        Self {
            sequence: AtomicU64::new(0),
            running: AtomicBool::new(running),
            base: AtomicU64::new(base),
        }
    }

    /// The value now, or `None` if it is being changed.
    pub fn read(&self, clock: &dyn Clock) -> Option<u64> {
        let sequence = self.sequence.load(Ordering::Acquire);
        let value = self.view().at(clock.now_10ns());
        fence(Ordering::Acquire);
        let unchanged = self.sequence.load(Ordering::Relaxed) == sequence;
        (unchanged && sequence.is_multiple_of(2)).then_some(value)
    }

    /// What the holder of the device's lock sees.
    pub fn view(&self) -> CounterView {
        CounterView {
            running: self.running.load(Ordering::Relaxed),
            base: self.base.load(Ordering::Relaxed),
        }
    }

    /// Replaces the view; only by the holder of the device's lock. `next` reads the clock.
    pub fn change(&self, next: impl FnOnce(CounterView) -> CounterView) {
        let sequence = self.sequence.load(Ordering::Relaxed);
        self.sequence.store(sequence.wrapping_add(1), Ordering::Relaxed);
        // Every CPU must see the odd number before the clock is read.
        fence(Ordering::SeqCst);
        let CounterView { running, base } = next(self.view());
        self.running.store(running, Ordering::Relaxed);
        self.base.store(base, Ordering::Relaxed);
        self.sequence.store(sequence.wrapping_add(2), Ordering::Release);
    }
}

/// Every interleaving of a reader and a writer:
/// `RUSTFLAGS="--cfg loom" cargo test -p devices --lib --release counter`.
#[cfg(all(test, loom))]
mod every_interleaving {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    /// Time that goes on with every look, in one order for all threads.
    struct LoomClock(AtomicU64);

    impl Clock for LoomClock {
        fn now_10ns(&self) -> u64 {
            fence(Ordering::SeqCst);
            let now = self.0.fetch_add(1, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            now
        }
    }

    fn parts(running: bool) -> (Arc<Counter>, Arc<LoomClock>) {
        let counter = Counter::new(CounterView { running, base: 100 });
        (Arc::new(counter), Arc::new(LoomClock(AtomicU64::new(7))))
    }

    /// Reads on a second thread, at most once, while `write` runs.
    fn read_during(running: bool, write: fn(&Counter, &LoomClock)) -> (Option<u64>, Arc<Counter>) {
        let (counter, clock) = parts(running);
        let (there, time) = (counter.clone(), clock.clone());
        let reader = thread::spawn(move || there.read(&*time));
        write(&counter, &clock);
        (reader.join().unwrap(), counter)
    }

    fn set_running(counter: &Counter, clock: &LoomClock, running: bool) {
        counter.change(|view| {
            let now = clock.now_10ns();
            CounterView::showing(view.at(now), running, now)
        });
    }

    #[test]
    fn a_halt_never_undercuts_a_read() {
        loom::model(|| {
            let (seen, counter) = read_during(true, |counter, clock| {
                set_running(counter, clock, false);
            });
            let halted = counter.view().base;
            assert!(seen.is_none_or(|seen| seen <= halted), "{seen:?} then {halted}");
        });
    }

    #[test]
    fn a_read_is_never_half_of_one_view_and_half_of_another() {
        loom::model(|| {
            let (seen, _) = read_during(false, |counter, clock| {
                set_running(counter, clock, true);
                counter.change(|_| CounterView { running: false, base: 1_000_000 });
            });
            let sane = |seen| (100..200).contains(&seen) || seen == 1_000_000;
            assert!(seen.is_none_or(sane), "{seen:?}");
        });
    }
}
