//! The reference clock's parameters, shared: a latch that no reader waits for.
//!
//! Two banks, and a sequence that is kept twice: `begun` counts the updates begun,
//! `done` those whose clock bank 0 holds. Equal, they select bank 0; unequal, an
//! update is filling bank 0 and they select bank 1, which still holds the previous
//! clock and is brought up to date after `done`. So a whole clock stands in the
//! selected bank at every instant: a reader that interrupts the writer, be it a
//! signal handler on the writer's own thread, reads the old clock and goes on. (A
//! seqlock's reader would wait for a writer that cannot run.)
//!
//! In the normal case a reader loads `done`, bank 0 and `begun`, in this order, and
//! is finished if the two are equal: no update was under way at the beginning nor
//! begun before the end. That one comparison also spares the seqlock's test for an
//! odd sequence, and no address depends on a loaded value. All of it lies in one
//! cache line.
//!
//! A reader starts over only if its bank was given up under it: then even an intact
//! sample was taken by a clock no longer valid. Each round thus means that an update
//! made progress meanwhile; while none does, there is no second round.
//!
//! Memory order: every store to a bank follows, after a release fence, the store
//! that deselected the bank (`begun` for bank 0, `done` for bank 1), and readers
//! load that one last, after an acquire fence. So a reader that saw any word of a
//! later update sees that its bank is no longer selected.

use std::sync::PoisonError;

use crate::reference::ReferenceClock;
use crate::sync::{AtomicU64, Mutex, Ordering, fence};

type Bank = [AtomicU64; 3];

/// What readers touch: one cache line.
#[repr(align(64))]
#[derive(Debug)]
struct Line {
    done: AtomicU64,
    begun: AtomicU64,
    banks: [Bank; 2],
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Line>() == 64 && align_of::<Line>() == 64);

/// A [`ReferenceClock`] that any number of threads and signal handlers read while
/// one thread at a time changes it.
#[derive(Debug)]
pub struct Latch {
    line: Line,
    /// The current clock, held while it is being replaced. Readers never touch it.
    writer: Mutex<ReferenceClock>,
}

impl Latch {
    /// A latch that holds `clock`.
    pub fn new(clock: ReferenceClock) -> Self {
        let bank = || clock.to_words().map(AtomicU64::new);
        // 64-bit sequences: they do not wrap while a reader sleeps.
        let line =
            Line { done: AtomicU64::new(0), begun: AtomicU64::new(0), banks: [bank(), bank()] };
        Self { line, writer: Mutex::new(clock) }
    }

    /// The current clock.
    ///
    /// To read the time, use [`Self::sample`]: between this and the TSC read that
    /// follows, the clock may be replaced.
    #[inline]
    pub fn read(&self) -> ReferenceClock {
        self.sample(|clock| *clock)
    }

    /// What `sample` makes of a clock that was the current one all the while: read
    /// the TSC in there.
    ///
    /// `sample` is called again if the clock was replaced meanwhile, and the result
    /// of the earlier call, which may have seen half of each clock, is dropped.
    #[inline]
    pub fn sample<R>(&self, sample: impl Fn(&ReferenceClock) -> R) -> R {
        let Line { done, begun, banks } = &self.line;
        loop {
            let sequence = done.load(Ordering::Acquire);
            let result = sample(&load(&banks[0]));
            fence(Ordering::Acquire);
            if begun.load(Ordering::Relaxed) == sequence {
                return result;
            }
            let (sequence, previous) = self.previous();
            let result = sample(&previous);
            fence(Ordering::Acquire);
            if done.load(Ordering::Relaxed) + 1 == sequence {
                return result;
            }
        }
    }

    /// The number of the latest update begun and, if that is still under way, the
    /// clock before it. Out of line, so that the normal case stays short.
    #[cold]
    #[inline(never)]
    fn previous(&self) -> (u64, ReferenceClock) {
        let sequence = self.line.begun.load(Ordering::Acquire);
        (sequence, load(&self.line.banks[1]))
    }

    /// Replaces the clock by `change` of it and returns the new one.
    ///
    /// Writers exclude each other for the time of the call; do not call this from a
    /// signal handler.
    pub fn update(&self, change: impl FnOnce(ReferenceClock) -> ReferenceClock) -> ReferenceClock {
        let mut current = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let clock = change(*current);
        *current = clock;
        let Line { done, begun, banks } = &self.line;
        let sequence = done.load(Ordering::Relaxed) + 1;

        // Release: whoever turns to bank 1 finds it whole.
        begun.store(sequence, Ordering::Release);
        fence(Ordering::Release);
        store(&banks[0], clock);
        // Release: whoever turns back to bank 0 finds it whole.
        done.store(sequence, Ordering::Release);
        fence(Ordering::Release);
        store(&banks[1], clock);
        clock
    }
}

#[inline]
fn load(bank: &Bank) -> ReferenceClock {
    ReferenceClock::from_words(std::array::from_fn(|i| bank[i].load(Ordering::Relaxed)))
}

fn store(bank: &Bank, clock: ReferenceClock) {
    for (word, value) in bank.iter().zip(clock.to_words()) {
        word.store(value, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests;
