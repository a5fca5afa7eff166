//! One comparator: when it matches, and what the guest reads from it.
//!
//! A match is the counter reaching the comparator by counting. A comparator that the counter has
//! passed, or equals when it is written, matches after the counter has wrapped: 43 s later in
//! 32-bit mode, 5 800 years later in 64-bit mode, which here is never.
//!
//! One exception. A driver that starts a periodic timer reads the counter, adds a period, writes
//! that to the comparator and then writes the period. Nothing on a board holds it up for a whole
//! period in between, but here its vCPU may be off the CPU for that long, and its tick would be
//! lost for 43 s. So a period written to a running timer whose comparator was passed less than
//! [`LATE_START`] ago moves the comparator on by whole periods to the next one to come.

use super::registers::{
    FSB_EN, INT_ENB, LEGACY, LEVEL, LOW, MODE32, PERIODIC, ROUTE, ROUTE_CAP, ROUTE_SHIFT,
    TIMER_FIXED, TIMER_WRITABLE, VAL_SET, Write,
};

/// How late a periodic timer may be started: 1 s. In 32-bit mode it also means that a comparator
/// cannot be set more than 41.9 s ahead of a running counter if a period is written after it.
const LATE_START: u64 = 100_000_000;

/// Everything that a snapshot of a timer needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimerState {
    /// The writable bits of the configuration register.
    pub config: u64,
    /// The next value to match.
    pub comparator: u64,
    /// What a match adds to the comparator of a periodic timer.
    pub period: u64,
    /// Message address (high half) and data (low half).
    pub fsb: u64,
    /// The halves of the comparator that VAL_SET still opens, as lanes.
    pub val_set: u64,
}

impl Default for TimerState {
    /// A timer after reset (§2.3.9): no match until the guest asks for one.
    fn default() -> Self {
        Self { config: 0, comparator: u64::MAX, period: 0, fsb: 0, val_set: 0 }
    }
}

/// Where a timer's interrupt goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Destination {
    /// A pin of the I/O APIC.
    Pin(u32),
    /// A message.
    Message { address: u64, data: u32 },
    /// The guest chose no pin.
    Nowhere,
}

/// A comparator at work.
#[derive(Clone, Debug)]
pub struct Timer {
    state: TimerState,
    /// Reference time of the next match, in 10 ns; `None` while the counter is halted and where
    /// the match lies beyond all time.
    next: Option<u64>,
    /// No timer thread is woken for another match of a periodic timer before this time.
    not_before: u64,
}

impl Timer {
    /// A timer whose counter is halted; whatever the state says is brought into range.
    pub fn new(state: TimerState) -> Self {
        let TimerState { config, comparator, period, fsb, val_set } = state;
        let mut timer = Self {
            state: TimerState { config: config & TIMER_WRITABLE, comparator, period, fsb, val_set },
            next: None,
            not_before: 0,
        };
        timer.truncate();
        timer
    }

    pub fn state(&self) -> TimerState {
        self.state
    }

    fn has(&self, bits: u64) -> bool {
        self.state.config & bits == bits
    }

    pub fn is_level(&self) -> bool {
        self.has(LEVEL)
    }

    pub fn is_periodic(&self) -> bool {
        self.has(PERIODIC)
    }

    pub fn interrupt_enabled(&self) -> bool {
        self.has(INT_ENB)
    }

    /// The lanes of the comparator that count.
    fn width(&self) -> u64 {
        if self.has(MODE32) { LOW } else { u64::MAX }
    }

    /// Where interrupts of timer `index` go under the general configuration `config` (§2.3.5:
    /// legacy replacement overrules pin and message).
    pub fn destination(&self, index: usize, config: u64) -> Destination {
        let pin = self.route();
        match index {
            0 if config & LEGACY != 0 => Destination::Pin(super::LEGACY_GSI[0]),
            1 if config & LEGACY != 0 => Destination::Pin(super::LEGACY_GSI[1]),
            _ if self.has(FSB_EN) => {
                Destination::Message { address: self.state.fsb >> 32, data: self.state.fsb as u32 }
            }
            _ if ROUTE_CAP >> pin & 1 != 0 => Destination::Pin(pin),
            _ => Destination::Nowhere,
        }
    }

    fn route(&self) -> u32 {
        ((self.state.config & ROUTE) >> ROUTE_SHIFT) as u32
    }

    // Registers.

    pub fn read_config(&self) -> u64 {
        let open = self.state.val_set & self.width() != 0;
        self.state.config | TIMER_FIXED | if open { VAL_SET } else { 0 }
    }

    pub fn comparator(&self) -> u64 {
        self.state.comparator
    }

    pub fn fsb(&self) -> u64 {
        self.state.fsb
    }

    pub fn write_config(&mut self, write: &Write) {
        let old = self.state.config;
        self.state.config = write.merge(old) & TIMER_WRITABLE;
        // A pin that the timer cannot drive is not taken; the guest reads back and sees.
        if ROUTE_CAP >> self.route() & 1 == 0 {
            self.state.config = self.state.config & !ROUTE | old & ROUTE;
        }
        if write.lanes & VAL_SET != 0 {
            let open = write.value & VAL_SET != 0 && self.is_periodic();
            self.state.val_set = if open { u64::MAX } else { 0 };
        }
        self.truncate();
    }

    /// Takes a write to the comparator; `counter` is the main counter's value if it runs.
    pub fn write_comparator(&mut self, write: &Write, counter: Option<u64>) {
        let width = self.width();
        let lanes = write.lanes & width;
        if lanes == 0 {
            return;
        }
        let write = Write { lanes, value: write.value & width, ..*write };
        let state = &mut self.state;
        if state.config & PERIODIC == 0 {
            state.comparator = write.merge(state.comparator);
            return;
        }
        state.period = write.merge(state.period);
        if state.val_set & lanes == lanes {
            // VAL_SET opens each half once, in either order or both at a time.
            state.comparator = write.merge(state.comparator);
            state.val_set &= !lanes;
            return;
        }
        state.val_set = 0;
        if let Some(counter) = counter.filter(|_| lanes == width) {
            self.catch_up(counter);
        }
    }

    /// The late start of the module's comment.
    fn catch_up(&mut self, counter: u64) {
        let late = counter.wrapping_sub(self.state.comparator) & self.width();
        if self.state.period != 0 && late < LATE_START {
            self.pass(late);
        }
    }

    /// Moves a periodic comparator that was reached `late` ticks ago to the next match.
    fn pass(&mut self, late: u64) {
        let matches = (late / self.state.period).wrapping_add(1);
        let moved = self.state.period.wrapping_mul(matches);
        self.state.comparator = self.state.comparator.wrapping_add(moved) & self.width();
    }

    pub fn write_fsb(&mut self, write: &Write) {
        self.state.fsb = write.merge(self.state.fsb);
    }

    /// In 32-bit mode the high halves are not there.
    fn truncate(&mut self) {
        let width = self.width();
        self.state.comparator &= width;
        self.state.period &= width;
    }

    // Time.

    /// Computes the next match from the counter's value now.
    pub fn start(&mut self, now: u64, counter: u64) {
        let skipped = self.state.comparator.wrapping_sub(counter).wrapping_sub(1) & self.width();
        self.next = now.checked_add(skipped).and_then(|time| time.checked_add(1));
    }

    /// The counter stands still: no match.
    pub fn stop(&mut self) {
        self.next = None;
    }

    /// Takes all matches up to `now` as one; true if there was any. A division, never a loop:
    /// a guest chooses the period and the host may have slept for a day.
    pub fn settle(&mut self, now: u64) -> bool {
        let Some(due) = self.next.filter(|due| *due <= now) else { return false };
        let late = now - due;
        self.next = self.step().and_then(|step| (now - late % step).checked_add(step));
        if self.is_periodic() && self.state.period != 0 {
            self.pass(late);
        }
        true
    }

    /// Ticks from one match to the next: the period, or until the counter wraps. `None` for the
    /// 64-bit wrap.
    fn step(&self) -> Option<u64> {
        match self.state.period {
            period @ 1.. if self.is_periodic() => Some(period),
            _ if self.has(MODE32) => Some(LOW + 1),
            _ => None,
        }
    }

    /// Holds back the timer thread for `interval` after an interrupt at `now`.
    pub fn rest(&mut self, now: u64, interval: u64) {
        self.not_before = now.saturating_add(interval);
    }

    /// When the timer thread may look at this timer; `None` if it never matches.
    pub fn wake_at(&self) -> Option<u64> {
        let next = self.next?;
        Some(if self.is_periodic() { next.max(self.not_before) } else { next })
    }
}
