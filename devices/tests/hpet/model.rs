//! The HPET as the specification tells it, slow and plain: time goes from one counter value that
//! a comparator names to the next, and a match is an equality that counting has brought about.
//!
//! Written from the specification, not from the device; the rules that the specification leaves
//! open are stated where they are used.

use std::collections::BTreeSet;

use crate::bench::*;

/// The rest of a periodic timer's interrupts (the device's own rule; fewer than ten timers).
const REST: u64 = 10_000;
const SECOND: u64 = 100_000_000;

#[derive(Clone, Debug)]
pub struct ModelTimer {
    pub config: u64,
    pub comparator: u64,
    pub period: u64,
    pub fsb: u64,
    open_low: bool,
    open_high: bool,
    /// When the first match was that nobody has looked at yet.
    unseen_since: Option<u64>,
    rests_until: u64,
}

impl ModelTimer {
    fn is(&self, bit: u64) -> bool {
        self.config & bit != 0
    }

    fn cut(&self, value: u64) -> u64 {
        if self.is(MODE32) { value % (1 << 32) } else { value }
    }

    /// How many ticks until the counter comes to equal the comparator.
    fn ticks_to_match(&self, counter: u64) -> u128 {
        let around = if self.is(MODE32) { 1u128 << 32 } else { 1u128 << 64 };
        let (target, here) = (u128::from(self.comparator), u128::from(self.cut(counter)));
        if target > here { target - here } else { target + around - here }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Event {
    Pulse(u32),
    Msi(u64, u32),
}

#[derive(Clone, Debug)]
pub struct Model {
    pub now: u64,
    pub counter: u64,
    pub config: u64,
    pub status: u64,
    pub timers: Vec<ModelTimer>,
    active: BTreeSet<usize>,
    pub lines: BTreeSet<u32>,
    pub events: Vec<Event>,
}

enum Target {
    Pin(u32),
    Message(u64, u32),
    None,
}

impl Model {
    pub fn new(timers: usize) -> Self {
        let timer = ModelTimer {
            config: 0,
            comparator: u64::MAX,
            period: 0,
            fsb: 0,
            open_low: false,
            open_high: false,
            unseen_since: None,
            rests_until: 0,
        };
        Self {
            now: 0,
            counter: 0,
            config: 0,
            status: 0,
            timers: vec![timer; timers],
            active: BTreeSet::new(),
            lines: BTreeSet::new(),
            events: Vec::new(),
        }
    }

    /// Counts to `until`, but takes `steps` matches at most; returns the time it reached.
    pub fn count(&mut self, until: u64, steps: usize) -> u64 {
        for _ in 0..steps {
            if self.now >= until {
                break;
            }
            let left = u128::from(until - self.now);
            if self.config & ENABLE == 0 {
                self.now = until;
                break;
            }
            let nearest = self.timers.iter().map(|timer| timer.ticks_to_match(self.counter));
            let step = nearest.fold(left, u128::min) as u64;
            self.now += step;
            self.counter = self.counter.wrapping_add(step);
            for timer in &mut self.timers {
                if timer.comparator == timer.cut(self.counter) {
                    timer.unseen_since.get_or_insert(self.now);
                    if timer.is(PERIODIC) {
                        timer.comparator = timer.cut(timer.comparator.wrapping_add(timer.period));
                    }
                }
            }
        }
        self.now
    }

    fn target(&self, index: usize) -> Target {
        let timer = &self.timers[index];
        let route = (timer.config >> 9) as u32 % 32;
        if self.config & LEGACY != 0 && index == 0 {
            Target::Pin(2)
        } else if self.config & LEGACY != 0 && index == 1 {
            Target::Pin(8)
        } else if timer.is(FSB_EN) {
            Target::Message(timer.fsb >> 32, timer.fsb as u32)
        } else if route == 0 {
            Target::None
        } else {
            Target::Pin(route)
        }
    }

    /// The matches so far of the timers that `looks` picks come to light.
    fn look(&mut self, looks: impl Fn(&ModelTimer, u64) -> bool) {
        let high_before = self.lines.clone();
        for index in 0..self.timers.len() {
            let timer = &mut self.timers[index];
            if timer.unseen_since.is_none() || !looks(timer, self.now) {
                continue;
            }
            timer.unseen_since = None;
            timer.rests_until = self.now + REST;
            if timer.is(LEVEL) {
                self.status |= 1 << index;
            } else if timer.is(INT_ENB) {
                match self.target(index) {
                    Target::Pin(gsi) if !high_before.contains(&gsi) => {
                        self.events.push(Event::Pulse(gsi));
                    }
                    Target::Message(address, data) => self.events.push(Event::Msi(address, data)),
                    _ => {}
                }
            }
        }
        self.settle_lines();
    }

    /// Level interrupts: active while enabled, pending and allowed.
    fn settle_lines(&mut self) {
        self.lines.clear();
        for index in 0..self.timers.len() {
            let timer = &self.timers[index];
            let active =
                self.config & ENABLE != 0 && timer.is(INT_ENB) && self.status >> index & 1 != 0;
            let was_active =
                if active { !self.active.insert(index) } else { self.active.remove(&index) };
            match self.target(index) {
                Target::Pin(gsi) if active => {
                    self.lines.insert(gsi);
                }
                Target::Message(address, data) if active && !was_active => {
                    self.events.push(Event::Msi(address, data));
                }
                _ => {}
            }
        }
    }

    pub fn legacy(&self) -> bool {
        self.config & ENABLE != 0 && self.config & LEGACY != 0
    }

    /// The timer thread comes by.
    pub fn expire(&mut self) {
        self.look(|timer, now| !timer.is(PERIODIC) || timer.rests_until <= now);
    }

    /// The time at which the timer thread should come by.
    pub fn deadline(&self) -> Option<u64> {
        let mut earliest = None::<u128>;
        for (index, timer) in self.timers.iter().enumerate() {
            let pending = timer.is(LEVEL) && self.status >> index & 1 != 0;
            let heard = match self.target(index) {
                Target::Pin(gsi) => !self.lines.contains(&gsi),
                Target::Message(..) => true,
                Target::None => false,
            };
            if self.config & ENABLE == 0 || !timer.is(INT_ENB) || pending || !heard {
                continue;
            }
            let mut at = match timer.unseen_since {
                Some(at) => at.into(),
                None => u128::from(self.now) + timer.ticks_to_match(self.counter),
            };
            if at > u64::MAX.into() {
                continue;
            }
            if timer.is(PERIODIC) {
                at = at.max(timer.rests_until.into());
            }
            earliest = Some(earliest.map_or(at, |earliest| earliest.min(at)));
        }
        earliest.map(|at| at as u64)
    }

    /// Any access but a read of the counter or the capabilities brings all matches to light.
    pub fn read(&mut self, offset: u64) -> u64 {
        if offset == COUNTER {
            return self.counter;
        }
        self.look(|_, _| true);
        let timer = |base: u64| &self.timers[((offset - base) / 0x20) as usize];
        match offset {
            CONFIG => self.config,
            STATUS => self.status,
            0x100.. if offset.is_multiple_of(0x20) => {
                let timer = timer(0x100);
                let open = timer.open_low || timer.open_high && !timer.is(MODE32);
                timer.config | 0x00FF_0104_0000_8030 | if open { VAL_SET } else { 0 }
            }
            0x108.. if offset % 0x20 == 0x08 => timer(0x108).comparator,
            0x110.. if offset % 0x20 == 0x10 => timer(0x110).fsb,
            _ => unreachable!("the test reads registers only"),
        }
    }

    /// Writes the low half, the high half or both.
    pub fn write(&mut self, offset: u64, value: u64, low: bool, high: bool) {
        self.look(|_, _| true);
        let into = |old: u64| {
            let (old_high, old_low) = (old >> 32, old & 0xFFFF_FFFF);
            let (new_high, new_low) = (value >> 32, value & 0xFFFF_FFFF);
            (if high { new_high } else { old_high }) << 32 | if low { new_low } else { old_low }
        };
        let index = (offset.wrapping_sub(0x100) / 0x20) as usize;
        match offset {
            CONFIG => self.config = into(self.config) & 3,
            STATUS if low => self.status &= !(value & 0xFFFF_FFFF),
            STATUS => {}
            COUNTER => self.counter = into(self.counter),
            0x100.. if offset.is_multiple_of(0x20) => {
                if low {
                    self.write_timer_config(index, value);
                }
            }
            0x108.. if offset % 0x20 == 0x08 => {
                let timer = &mut self.timers[index];
                // The high half does not exist in 32-bit mode.
                let high = high && !timer.is(MODE32);
                if !low && !high {
                } else if timer.is(PERIODIC) {
                    timer.period = timer.cut(into(timer.period));
                    let all_open = (!low || timer.open_low) && (!high || timer.open_high);
                    if all_open {
                        timer.comparator = timer.cut(into(timer.comparator));
                        timer.open_low &= !low;
                        timer.open_high &= !high;
                    } else {
                        // A half that is written a second time ends VAL_SET.
                        (timer.open_low, timer.open_high) = (false, false);
                        // The device's own rule: a start less than 1 s late is made good, one
                        // period at a time.
                        let whole = low && (high || timer.is(MODE32));
                        let passed = timer.cut(self.counter.wrapping_sub(timer.comparator));
                        if whole && self.config & ENABLE != 0 && timer.period != 0 {
                            let mut left = passed;
                            while passed < SECOND && left < SECOND {
                                timer.comparator =
                                    timer.cut(timer.comparator.wrapping_add(timer.period));
                                if timer.period > left {
                                    break;
                                }
                                left -= timer.period;
                            }
                        }
                    }
                } else {
                    timer.comparator = timer.cut(into(timer.comparator));
                }
            }
            0x110.. if offset % 0x20 == 0x10 => {
                self.timers[index].fsb = into(self.timers[index].fsb)
            }
            _ => unreachable!("the test writes registers only"),
        }
        self.settle_lines();
    }

    fn write_timer_config(&mut self, index: usize, value: u64) {
        let timer = &mut self.timers[index];
        let mut route = value >> 9 & 0x1F;
        if ![2, 8, 16, 17, 18, 19, 20, 21, 22, 23].contains(&route) {
            route = timer.config >> 9 & 0x1F;
        }
        let kept = LEVEL | INT_ENB | PERIODIC | MODE32 | FSB_EN;
        timer.config = value & kept | route << 9;
        let open = value & VAL_SET != 0 && timer.is(PERIODIC);
        (timer.open_low, timer.open_high) = (open, open);
        timer.comparator = timer.cut(timer.comparator);
        timer.period = timer.cut(timer.period);
        if !timer.is(LEVEL) {
            self.status &= !(1 << index);
        }
    }
}
