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

/// A [`ReferenceClock`] that any number of threads and signal handlers read while
/// one thread at a time changes it.
#[derive(Debug)]
pub struct Latch {
    line: Line<3>,
    /// The current clock, held while it is being replaced. Readers never touch it.
    writer: Mutex<ReferenceClock>,
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Line<3>>() == 64 && align_of::<Line<3>>() == 64);

impl Latch {
    /// A latch that holds `clock`.
    pub fn new(clock: ReferenceClock) -> Self {
        Self { line: Line::new(clock.to_words()), writer: Mutex::new(clock) }
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
        self.line.sample(move |words| sample(&ReferenceClock::from_words(words)))
    }

    /// Replaces the clock by `change` of it and returns the new one.
    ///
    /// Writers exclude each other for the time of the call; do not call this from a
    /// signal handler.
    pub fn update(&self, change: impl FnOnce(ReferenceClock) -> ReferenceClock) -> ReferenceClock {
        let mut current = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let clock = change(*current);
        *current = clock;
        self.line.store(clock.to_words());
        clock
    }
}

/// The latch itself, for N words: all that readers touch.
#[repr(align(64))]
#[derive(Debug)]
struct Line<const N: usize> {
    /// 64 bits wide, the sequences do not wrap while a reader sleeps.
    done: AtomicU64,
    begun: AtomicU64,
    banks: [[AtomicU64; N]; 2],
}

impl<const N: usize> Line<N> {
    fn new(words: [u64; N]) -> Self {
        let bank = || words.map(AtomicU64::new);
        Self { done: AtomicU64::new(0), begun: AtomicU64::new(0), banks: [bank(), bank()] }
    }

    #[inline]
    fn sample<R>(&self, sample: impl Fn([u64; N]) -> R) -> R {
        match self.sample_bank_0(&sample) {
            Some(result) => result,
            None => self.sample_during_store(sample),
        }
    }

    /// Out of line, so that the normal case runs straight through.
    #[cold]
    #[inline(never)]
    fn sample_during_store<R>(&self, sample: impl Fn([u64; N]) -> R) -> R {
        loop {
            let result = self.sample_bank_1(&sample).or_else(|| self.sample_bank_0(&sample));
            if let Some(result) = result {
                return result;
            }
        }
    }

    /// The sample, if no update was under way nor began meanwhile.
    #[inline]
    fn sample_bank_0<R>(&self, sample: impl Fn([u64; N]) -> R) -> Option<R> {
        let sequence = self.done.load(Ordering::Acquire);
        let result = sample(self.load(0));
        fence(Ordering::Acquire);
        (self.begun.load(Ordering::Relaxed) == sequence).then_some(result)
    }

    /// The sample, if one update was under way all the while.
    fn sample_bank_1<R>(&self, sample: impl Fn([u64; N]) -> R) -> Option<R> {
        let sequence = self.begun.load(Ordering::Acquire);
        let result = sample(self.load(1));
        fence(Ordering::Acquire);
        (self.done.load(Ordering::Relaxed) + 1 == sequence).then_some(result)
    }

    #[inline]
    fn load(&self, bank: usize) -> [u64; N] {
        std::array::from_fn(|i| self.banks[bank][i].load(Ordering::Relaxed))
    }

    /// Only one call at a time.
    fn store(&self, words: [u64; N]) {
        let store_to = |bank: usize| {
            for (place, word) in self.banks[bank].iter().zip(words) {
                place.store(word, Ordering::Relaxed);
            }
        };
        let sequence = self.done.load(Ordering::Relaxed) + 1;

        // Release: whoever turns to bank 1 finds it whole.
        self.begun.store(sequence, Ordering::Release);
        fence(Ordering::Release);
        store_to(0);
        // Release: whoever turns back to bank 0 finds it whole.
        self.done.store(sequence, Ordering::Release);
        fence(Ordering::Release);
        store_to(1);
    }
}

#[cfg(test)]
mod tests;
