//! An HPET on a bench: a clock set by hand and everything that it does written down.

use std::sync::Arc;

use devices::bus::Device;
use devices::hpet::Hpet;
use devices::testing::{FakeClock, Output, Recorder};

pub const CAPABILITIES: u64 = 0x000;
pub const CONFIG: u64 = 0x010;
pub const STATUS: u64 = 0x020;
pub const COUNTER: u64 = 0x0F0;

pub const ENABLE: u64 = 1;
pub const LEGACY: u64 = 2;

pub const LEVEL: u64 = 1 << 1;
pub const INT_ENB: u64 = 1 << 2;
pub const PERIODIC: u64 = 1 << 3;
pub const VAL_SET: u64 = 1 << 6;
pub const MODE32: u64 = 1 << 8;
pub const FSB_EN: u64 = 1 << 14;

/// A route to GSI `gsi`.
pub const fn route(gsi: u64) -> u64 {
    gsi << 9
}

pub const fn timer_config(timer: u64) -> u64 {
    0x100 + 0x20 * timer
}

pub const fn comparator(timer: u64) -> u64 {
    0x108 + 0x20 * timer
}

pub const fn fsb(timer: u64) -> u64 {
    0x110 + 0x20 * timer
}

pub struct Bench {
    pub clock: Arc<FakeClock>,
    pub recorder: Arc<Recorder>,
    pub hpet: Hpet,
}

impl Bench {
    pub fn new(timers: usize) -> Self {
        let clock = Arc::new(FakeClock::default());
        let recorder = Arc::new(Recorder::default());
        let hpet = Hpet::new(timers, clock.clone(), recorder.clone(), recorder.clone());
        Self { clock, recorder, hpet }
    }

    pub fn read(&self, offset: u64) -> u64 {
        let mut data = [0; 8];
        self.hpet.read(offset, &mut data);
        u64::from_le_bytes(data)
    }

    pub fn read32(&self, offset: u64) -> u32 {
        let mut data = [0; 4];
        self.hpet.read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    pub fn write(&self, offset: u64, value: u64) {
        self.hpet.write(offset, &value.to_le_bytes());
    }

    pub fn write32(&self, offset: u64, value: u32) {
        self.hpet.write(offset, &value.to_le_bytes());
    }

    /// Lets time pass with a timer thread that is never late; returns what happened and when.
    pub fn run(&self, ticks: u64) -> Vec<(u64, Output)> {
        let end = self.clock.get() + ticks;
        let mut happened = Vec::new();
        while let Some(deadline) = self.recorder.deadline().filter(|deadline| *deadline <= end) {
            self.clock.set(self.clock.get().max(deadline));
            self.hpet.expire();
            let outputs = self.recorder.take();
            assert_ne!(outputs, [], "woken at {deadline} for nothing");
            happened.extend(outputs.into_iter().map(|output| (self.clock.get(), output)));
        }
        self.clock.set(end);
        happened
    }

    /// The host stops the whole process for a while, timer thread and all; then it goes on.
    pub fn stop(&self, ticks: u64) -> Vec<Output> {
        self.clock.advance(ticks as i64);
        if self.recorder.deadline().is_some_and(|deadline| deadline <= self.clock.get()) {
            self.hpet.expire();
        }
        self.recorder.take()
    }
}
