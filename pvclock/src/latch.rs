//! The reference clock's parameters, shared: a latch that no reader waits for.
//!
//! Two banks and a sequence whose lowest bit says which bank readers use. A writer
//! fills the *other* bank and then advances the sequence, so a whole set of
//! parameters stands at the sequence's bank at every instant: a reader that
//! interrupts the writer, be it a signal handler on the writer's own thread, reads
//! the old set and goes on. (A seqlock's reader would wait for a writer that cannot
//! run.) Nothing but the readers' bank and the sequence is read, and they share one
//! cache line.
//!
//! A reader checks the sequence again afterwards, because a *second* update fills
//! the bank that it is reading. It starts over if the sequence moved at all: then
//! even an intact sample was taken by a clock no longer valid. Each retry thus
//! means that an update was completed meanwhile; without one, there is none.
//!
//! Memory order: an update's words are stored after the previous update's sequence,
//! with a release fence between, and loaded before the second sequence load, with
//! an acquire fence between. So a reader that saw any word of a later update sees
//! that the sequence has moved on.

use std::sync::PoisonError;

use crate::reference::ReferenceClock;
use crate::sync::{AtomicU64, Mutex, Ordering, fence};

const WORDS: usize = 3;

/// What readers touch: one cache line.
#[repr(align(64))]
#[derive(Debug)]
struct Line {
    sequence: AtomicU64,
    banks: [[AtomicU64; WORDS]; 2],
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
        // 64-bit: a sequence that wraps within one read would take centuries.
        let bank = || clock.to_words().map(AtomicU64::new);
        Self {
            line: Line { sequence: AtomicU64::new(0), banks: [bank(), bank()] },
            writer: Mutex::new(clock),
        }
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
        let mut sequence = self.line.sequence.load(Ordering::Acquire);
        loop {
            let bank = &self.line.banks[(sequence & 1) as usize];
            let words = std::array::from_fn(|i| bank[i].load(Ordering::Relaxed));
            let result = sample(&ReferenceClock::from_words(words));
            fence(Ordering::Acquire);
            let after = self.line.sequence.load(Ordering::Acquire);
            if after == sequence {
                return result;
            }
            sequence = after;
        }
    }

    /// Replaces the clock by `change` of it and returns the new one.
    ///
    /// Writers exclude each other for the time of the call; do not call this from a
    /// signal handler.
    pub fn update(&self, change: impl FnOnce(ReferenceClock) -> ReferenceClock) -> ReferenceClock {
        let mut current = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let clock = change(*current);
        *current = clock;
        let next = self.line.sequence.load(Ordering::Relaxed) + 1;
        // The sequence that retired this bank is visible before its new words.
        fence(Ordering::Release);
        let bank = &self.line.banks[(next & 1) as usize];
        for (word, value) in bank.iter().zip(clock.to_words()) {
            word.store(value, Ordering::Relaxed);
        }
        self.line.sequence.store(next, Ordering::Release);
        clock
    }
}

#[cfg(test)]
mod tests;
