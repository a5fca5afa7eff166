//! Doubles for unit tests and fuzzers: time that is set by hand, lines and messages that are
//! written down.

use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::clock::Clock;
use crate::hpet::{Interrupts, TimerService};

/// A clock that stands still until somebody moves it, in either direction.
#[derive(Debug, Default)]
pub struct FakeClock {
    now_10ns: AtomicU64,
    reads: AtomicU64,
}

impl FakeClock {
    /// Sets the time, in units of 10 ns.
    pub fn set(&self, now_10ns: u64) {
        self.now_10ns.store(now_10ns, Ordering::Release);
    }

    /// The time, without counting as a read.
    pub fn get(&self) -> u64 {
        self.now_10ns.load(Ordering::Acquire)
    }

    /// Moves the time by `delta` units of 10 ns, wrapping.
    pub fn advance(&self, delta: i64) {
        self.now_10ns.fetch_add(delta as u64, Ordering::AcqRel);
    }

    /// How often a device has read this clock.
    pub fn reads(&self) -> u64 {
        self.reads.load(Ordering::Relaxed)
    }
}

impl Clock for FakeClock {
    fn now_10ns(&self) -> u64 {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.get()
    }
}

/// A console output that is kept.
#[derive(Clone, Debug, Default)]
pub struct Sink(Arc<Mutex<Vec<u8>>>);

impl Sink {
    /// Takes what was written so far.
    pub fn take(&self) -> Vec<u8> {
        std::mem::take(&mut *lock(&self.0))
    }
}

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        lock(&self.0).extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// What a device did to the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Output {
    /// A line changed its level.
    Line(u32, bool),
    /// One edge on a line.
    Pulse(u32),
    /// A message: address and data.
    Msi(u64, u32),
    /// Legacy replacement came or went.
    Legacy(bool),
}

#[derive(Debug, Default)]
struct Record {
    outputs: Vec<Output>,
    lines: u32,
    deadline: Option<u64>,
    deadline_calls: usize,
}

/// Interrupt lines and a timer service that only take notes.
#[derive(Debug, Default)]
pub struct Recorder(Mutex<Record>);

impl Recorder {
    /// Takes the outputs since the last call.
    pub fn take(&self) -> Vec<Output> {
        std::mem::take(&mut lock(&self.0).outputs)
    }

    /// The lines that are high, one bit each.
    pub fn lines(&self) -> u32 {
        lock(&self.0).lines
    }

    /// The deadline last asked for.
    pub fn deadline(&self) -> Option<u64> {
        lock(&self.0).deadline
    }

    /// How often a deadline was asked for.
    pub fn deadline_calls(&self) -> usize {
        lock(&self.0).deadline_calls
    }
}

impl Interrupts for Recorder {
    fn set_line(&self, gsi: u32, level: bool) {
        let mut record = lock(&self.0);
        let bit = 1 << gsi;
        assert_ne!(record.lines & bit != 0, level, "set_line({gsi}, {level}) changes nothing");
        record.lines ^= bit;
        record.outputs.push(Output::Line(gsi, level));
    }

    fn pulse(&self, gsi: u32) {
        let mut record = lock(&self.0);
        assert_eq!(record.lines & 1 << gsi, 0, "pulse({gsi}) on a line that is high");
        record.outputs.push(Output::Pulse(gsi));
    }

    fn msi(&self, address: u64, data: u32) {
        lock(&self.0).outputs.push(Output::Msi(address, data));
    }

    fn legacy_replacement(&self, on: bool) {
        lock(&self.0).outputs.push(Output::Legacy(on));
    }
}

impl TimerService for Recorder {
    fn set_deadline(&self, deadline_10ns: Option<u64>) {
        let mut record = lock(&self.0);
        record.deadline = deadline_10ns;
        record.deadline_calls += 1;
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
