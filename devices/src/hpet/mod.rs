//! The high-precision event timer: IA-PC HPET specification 1.0a, complete.
//!
//! 100 MHz, so a tick is 10 ns, the unit of [`Clock`]; 64-bit counter; 3 to 32 timers, each
//! one-shot or periodic, 32 or 64 bits wide, edge or level, to a pin, a message or (timers 0 and
//! 1) in the place of the PIT and the RTC.
//!
//! Reading the counter takes no lock. Everything else happens under one: first the matches that
//! time has brought are taken, then the register changes, then interrupt lines, deadline and
//! mirror follow from the new state.
//!
//! Threats: a guest chooses comparators, periods, pins and message addresses and can write from
//! all vCPUs at once. Each access and each expiry touches every timer once, with no loop over
//! time. Missed matches are one match. The timer thread is woken only for an interrupt that can
//! be delivered, and for a periodic timer not more often than every [`MIN_INTERVAL_10NS`] or
//! [`SHARE_10NS`] per timer, so that no period, however short, can keep it busy: at most 100 000
//! interrupts per second with any number of timers. (One-shot timers cost the guest an exit per
//! interrupt and need no such rest.) Message addresses go to [`Interrupts::msi`] as the guest
//! wrote them.

mod counter;
mod registers;
mod timer;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use counter::Counter;
pub use counter::CounterView;
use registers::{ENABLE, LEGACY, Register, Write, capabilities};
pub use registers::{IMAGE_WORDS, MAX_TIMERS, MIN_TIMERS, PERIOD_FS, ROUTE_CAP};
pub use timer::TimerState;
use timer::{Destination, Timer};

use crate::bus::Device;
use crate::clock::Clock;

/// Guest-physical address of the registers.
pub const BASE: u64 = 0xFED0_0000;
/// Length of the range: one page, since 32 timers need more than 1 KiB. What is behind the
/// registers reads zero.
pub const LEN: u64 = 0x1000;
/// Offset of the main counter.
pub const COUNTER_OFFSET: u64 = 0xF0;
/// Where timers 0 and 1 go under legacy replacement: the I/O APIC pins of the PIT (ISA IRQ 0,
/// whose 8259 pin is 0) and the RTC.
pub const LEGACY_GSI: [u32; 2] = [2, 8];

/// A periodic timer's interrupts from the timer thread are at least this far apart: 100 µs.
/// Ten times the highest CONFIG_HZ, and half of KVM's own bound for a periodic LAPIC timer.
pub const MIN_INTERVAL_10NS: u64 = 10_000;
/// With many timers, as many times this: 10 µs.
pub const SHARE_10NS: u64 = 1_000;

/// Interrupt lines and messages.
///
/// Called under the HPET's lock, so that changes of one line arrive in order: implementations
/// must not block or call the HPET.
pub trait Interrupts: Send + Sync {
    /// Sets the level of a line. Called on changes only.
    fn set_line(&self, gsi: u32, level: bool);
    /// One edge on a line that is low.
    fn pulse(&self, gsi: u32);
    /// A message as the guest wrote it: any 32-bit address, any data.
    fn msi(&self, address: u64, data: u32);
    /// Timers 0 and 1 take (or give back) the places of the PIT and the RTC, whose lines are to
    /// be cut while `on`.
    fn legacy_replacement(&self, on: bool);
}

/// Whoever calls [`Hpet::expire`].
pub trait TimerService: Send + Sync {
    /// Asks for one call of [`Hpet::expire`] at or after a reference time in units of 10 ns, in
    /// place of what was asked before; `None` for no call.
    ///
    /// Called under the HPET's lock, on changes and at the end of every `expire`.
    fn set_deadline(&self, deadline_10ns: Option<u64>);
}

/// A copy of the registers that the guest reads without an exit.
///
/// Both are called under the HPET's lock.
pub trait Mirror: Send + Sync {
    /// The counter is about to be halted, started or written: whoever stores its value must have
    /// stopped when this returns, and goes on after the next `update`.
    fn hold_counter(&self);
    /// The registers have changed. The counter's word is its value now; while `counter` runs, and
    /// the counter was not held, it is to be left to whoever stores it.
    fn update(&self, image: &[u64; IMAGE_WORDS], counter: CounterView);
}

/// Everything that a snapshot needs; interrupt lines and deadlines follow from it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HpetState {
    /// General configuration: ENABLE and LEG_RT.
    pub config: u64,
    /// Interrupt status.
    pub status: u32,
    /// The main counter's value when the state was taken.
    pub counter: u64,
    /// One entry per timer.
    pub timers: Vec<TimerState>,
}

/// What the lock guards.
struct Core {
    config: u64,
    status: u32,
    timers: Box<[Timer]>,
    /// The latest time seen: the device's own time does not run backwards.
    now: u64,
    /// Timers whose level interrupt is active, one bit each.
    asserted: u32,
    /// Lines that are high, one bit per GSI.
    lines: u32,
    legacy: bool,
    /// What the timer service was asked for; `None` if it is to be asked in any case.
    asked: Option<Option<u64>>,
}

impl Core {
    fn enabled(&self) -> bool {
        self.config & ENABLE != 0
    }

    /// Whether the next match of a timer raises an interrupt.
    fn can_deliver(&self, index: usize, timer: &Timer) -> bool {
        let pending = timer.is_level() && self.status >> index & 1 != 0;
        self.enabled()
            && timer.interrupt_enabled()
            && !pending
            && match timer.destination(index, self.config) {
                Destination::Pin(gsi) => self.lines >> gsi & 1 == 0,
                Destination::Message { .. } => true,
                Destination::Nowhere => false,
            }
    }

    /// Whether the next match of a timer changes a register.
    fn can_be_seen(&self, index: usize, timer: &Timer) -> bool {
        timer.is_periodic() || timer.is_level() && self.status >> index & 1 == 0
    }

    /// A register's value, when the counter's is `counter`.
    fn read(&self, register: Register, counter: u64) -> u64 {
        match register {
            Register::Capabilities => capabilities(self.timers.len()),
            Register::Config => self.config,
            Register::Status => self.status.into(),
            Register::Counter => counter,
            Register::TimerConfig(index) => self.timers[index].read_config(),
            Register::Comparator(index) => self.timers[index].comparator(),
            Register::Fsb(index) => self.timers[index].fsb(),
            Register::Reserved => 0,
        }
    }
}

/// The timers for which `test` holds, one bit each.
fn mask(timers: &[Timer], test: impl Fn(usize, &Timer) -> bool) -> u32 {
    let bit = |(index, timer)| u32::from(test(index, timer)) << index;
    timers.iter().enumerate().map(bit).fold(0, |all, bit| all | bit)
}

/// The device.
pub struct Hpet {
    core: Mutex<Core>,
    counter: Counter,
    timers: usize,
    clock: Arc<dyn Clock>,
    interrupts: Arc<dyn Interrupts>,
    service: Arc<dyn TimerService>,
    mirror: Option<Arc<dyn Mirror>>,
}

impl Hpet {
    /// A block after reset. `num_timers` is brought into 3–32.
    pub fn new(
        num_timers: usize,
        clock: Arc<dyn Clock>,
        interrupts: Arc<dyn Interrupts>,
        service: Arc<dyn TimerService>,
    ) -> Self {
        let state = HpetState {
            config: 0,
            status: 0,
            counter: 0,
            timers: vec![TimerState::default(); num_timers.clamp(MIN_TIMERS, MAX_TIMERS)],
        };
        Self::from_state(state, clock, interrupts, service)
    }

    /// A block as [`Hpet::state`] described it. Drives the lines and asks for the deadline that
    /// follow from the state. Missing timers are reset ones, more than 32 are cut.
    pub fn from_state(
        state: HpetState,
        clock: Arc<dyn Clock>,
        interrupts: Arc<dyn Interrupts>,
        service: Arc<dyn TimerService>,
    ) -> Self {
        let HpetState { config, status, counter, mut timers } = state;
        timers.resize(timers.len().clamp(MIN_TIMERS, MAX_TIMERS), TimerState::default());
        let timers: Box<[Timer]> = timers.into_iter().map(Timer::new).collect();
        let levels = mask(&timers, |_, timer| timer.is_level());
        let now = clock.now_10ns();
        let core = Core {
            config: config & (ENABLE | LEGACY),
            status: status & levels,
            timers,
            now,
            asserted: 0,
            lines: 0,
            legacy: false,
            asked: Some(None),
        };
        let view = CounterView::showing(counter, core.enabled(), now);
        let hpet = Self {
            timers: core.timers.len(),
            core: Mutex::new(core),
            counter: Counter::new(view),
            clock,
            interrupts,
            service,
            mirror: None,
        };
        hpet.rearm(&mut hpet.lock());
        hpet
    }

    /// Keeps `mirror` in step from now on.
    ///
    /// The timer thread is then woken also for matches that raise no interrupt but that the
    /// guest can see: a status bit that is set, a periodic comparator that moves.
    pub fn with_mirror(mut self, mirror: Arc<dyn Mirror>) -> Self {
        self.mirror = Some(mirror);
        self.finish(&mut self.lock());
        self
    }

    /// A copy of the registers.
    pub fn state(&self) -> HpetState {
        let mut core = self.lock();
        self.settle(&mut core);
        self.finish(&mut core);
        HpetState {
            config: core.config,
            status: core.status,
            counter: self.counter.view().at(core.now),
            timers: core.timers.iter().map(Timer::state).collect(),
        }
    }

    /// The main counter now. Takes no lock unless the counter is being halted, started or
    /// written at this moment.
    pub fn counter(&self) -> u64 {
        self.counter.read(&*self.clock).unwrap_or_else(|| {
            let _core = self.lock();
            self.counter.view().at(self.clock.now_10ns())
        })
    }

    /// What the counter shows at any time, for a mirror's writer that [`Mirror::hold_counter`]
    /// keeps from using one that is stale.
    pub fn counter_view(&self) -> CounterView {
        let _core = self.lock();
        self.counter.view()
    }

    /// Takes the matches that are due; for the timer service.
    pub fn expire(&self) {
        let mut core = self.lock();
        self.observe(&mut core);
        let due = mask(&core.timers, |_, timer| timer.wake_at().is_some_and(|at| at <= core.now));
        self.take_matches(&mut core, due);
        // The service has used up the old deadline even where the new one is the same.
        core.asked = None;
        self.finish(&mut core);
    }

    fn lock(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn observe(&self, core: &mut Core) {
        core.now = core.now.max(self.clock.now_10ns());
    }

    /// Takes every match up to now.
    fn settle(&self, core: &mut Core) {
        self.observe(core);
        self.take_matches(core, u32::MAX);
    }

    /// Takes the matches of the timers in `which`, and delivers what comes of them.
    fn take_matches(&self, core: &mut Core, which: u32) {
        let interval = MIN_INTERVAL_10NS.max(SHARE_10NS * self.timers as u64);
        for (index, timer) in core.timers.iter_mut().enumerate() {
            if which >> index & 1 == 0 || !timer.settle(core.now) {
                continue;
            }
            timer.rest(core.now, interval);
            if timer.is_level() {
                core.status |= 1 << index;
            } else if timer.interrupt_enabled() {
                match timer.destination(index, core.config) {
                    // A line that a level interrupt holds high has no edge to give.
                    Destination::Pin(gsi) if core.lines >> gsi & 1 == 0 => {
                        self.interrupts.pulse(gsi);
                    }
                    Destination::Message { address, data } => self.interrupts.msi(address, data),
                    _ => {}
                }
            }
        }
        self.drive(core);
    }

    /// Brings lines and level messages in step with the state.
    fn drive(&self, core: &mut Core) {
        let mut lines = 0;
        let asserted = mask(&core.timers, |index, timer| {
            core.enabled() && timer.interrupt_enabled() && core.status >> index & 1 != 0
        });
        for (index, timer) in core.timers.iter().enumerate() {
            if asserted >> index & 1 == 0 {
                continue;
            }
            match timer.destination(index, core.config) {
                Destination::Pin(gsi) => lines |= 1 << gsi,
                Destination::Message { address, data } if core.asserted >> index & 1 == 0 => {
                    self.interrupts.msi(address, data);
                }
                _ => {}
            }
        }
        let legacy = core.config & (ENABLE | LEGACY) == ENABLE | LEGACY;
        if legacy && !core.legacy {
            self.interrupts.legacy_replacement(true);
        }
        for gsi in (0..u32::BITS).filter(|gsi| (lines ^ core.lines) >> gsi & 1 != 0) {
            self.interrupts.set_line(gsi, lines >> gsi & 1 != 0);
        }
        if !legacy && core.legacy {
            self.interrupts.legacy_replacement(false);
        }
        (core.asserted, core.lines, core.legacy) = (asserted, lines, legacy);
    }

    /// Computes the matches to come, then [`Hpet::finish`]es.
    fn rearm(&self, core: &mut Core) {
        let view = self.counter.view();
        for timer in &mut core.timers {
            if view.running {
                timer.start(core.now, view.at(core.now));
            } else {
                timer.stop();
            }
        }
        self.finish(core);
    }

    /// Lines, deadline and mirror follow from the state.
    fn finish(&self, core: &mut Core) {
        self.drive(core);
        let visible = self.mirror.is_some();
        let deadline = (core.timers.iter().enumerate())
            .filter(|(index, timer)| {
                core.can_deliver(*index, timer) || visible && core.can_be_seen(*index, timer)
            })
            .filter_map(|(_, timer)| timer.wake_at())
            .min();
        if core.asked != Some(deadline) {
            core.asked = Some(deadline);
            self.service.set_deadline(deadline);
        }
        if let Some(mirror) = &self.mirror {
            let view = self.counter.view();
            let counter = view.at(core.now);
            let mut image = [0; IMAGE_WORDS];
            for (word, offset) in image.iter_mut().zip((0..).step_by(8)) {
                *word = core.read(Register::at(offset, self.timers), counter);
            }
            mirror.update(&image, view);
        }
    }

    /// Halts, starts or writes the counter.
    fn change_counter(&self, core: &mut Core, running: bool, value: impl FnOnce(u64) -> u64) {
        if let Some(mirror) = &self.mirror {
            mirror.hold_counter();
        }
        self.counter.change(|view| {
            self.settle(core);
            CounterView::showing(value(view.at(core.now)), running, core.now)
        });
    }
}

impl Device for Hpet {
    fn read(&self, offset: u64, data: &mut [u8]) {
        registers::read(offset, data, |word| match Register::at(word, self.timers) {
            Register::Counter => self.counter(),
            Register::Capabilities => capabilities(self.timers),
            Register::Reserved => 0,
            register => {
                let mut core = self.lock();
                self.settle(&mut core);
                self.finish(&mut core);
                core.read(register, 0)
            }
        });
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let Some(write) = Write::decode(offset, data, self.timers) else { return };
        let mut core = self.lock();
        let core = &mut *core;
        self.settle(core);
        match write.register {
            Register::Config => {
                let config = write.merge(core.config) & (ENABLE | LEGACY);
                if (config ^ core.config) & ENABLE != 0 {
                    self.change_counter(core, config & ENABLE != 0, |value| value);
                }
                core.config = config;
            }
            Register::Status => core.status &= !(write.value as u32),
            Register::Counter => {
                self.change_counter(core, core.enabled(), |value| write.merge(value));
            }
            Register::TimerConfig(index) => {
                core.timers[index].write_config(&write);
                if !core.timers[index].is_level() {
                    core.status &= !(1 << index);
                }
            }
            Register::Comparator(index) => {
                let view = self.counter.view();
                let counter = view.running.then(|| view.at(core.now));
                core.timers[index].write_comparator(&write, counter);
            }
            Register::Fsb(index) => core.timers[index].write_fsb(&write),
            Register::Capabilities | Register::Reserved => {}
        }
        self.rearm(core);
    }
}
