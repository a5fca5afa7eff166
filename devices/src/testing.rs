//! Doubles for unit tests and fuzzers: time that is set by hand.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::clock::Clock;

/// A clock that stands still until somebody moves it, in either direction.
#[derive(Debug, Default)]
pub struct FakeClock(AtomicU64);

impl FakeClock {
    /// Sets the time, in units of 10 ns.
    pub fn set(&self, now_10ns: u64) {
        self.0.store(now_10ns, Ordering::Release);
    }

    /// Moves the time by `delta` units of 10 ns, wrapping.
    pub fn advance(&self, delta: i64) {
        self.0.fetch_add(delta as u64, Ordering::AcqRel);
    }
}

impl Clock for FakeClock {
    fn now_10ns(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
}
