//! The device and the model do the same under random accesses and random, also backwards, time.

use devices::bus::Device;
use devices::testing::Output;
use proptest::prelude::*;

use crate::bench::*;
use crate::model::{Event, Model};

const TIMERS: usize = 4;
/// Matches that the model takes in one move of time; a longer move is cut short.
const MODEL_STEPS: usize = 3_000;

#[derive(Clone, Debug)]
enum Step {
    Read {
        offset: u64,
    },
    Write {
        offset: u64,
        value: u64,
        low: bool,
        high: bool,
    },
    /// Move the time; the timer thread comes by if it is due.
    Pass(u64),
    /// Move the time back.
    Back(u64),
    /// The timer thread comes by for nothing.
    Expire,
}

fn offset() -> impl Strategy<Value = u64> {
    let timer = 0..TIMERS as u64;
    prop_oneof![
        2 => Just(CONFIG),
        2 => Just(STATUS),
        1 => Just(COUNTER),
        4 => timer.clone().prop_map(timer_config),
        5 => timer.clone().prop_map(comparator),
        1 => timer.prop_map(fsb),
    ]
}

/// Values near what matters: zero, the counter's low range, the wraps.
fn value() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => 0u64..300,
        2 => 0u64..200_000,
        2 => (0u64..600).prop_map(|n| (1u64 << 32).wrapping_add(n).wrapping_sub(300)),
        1 => (0u64..600).prop_map(|n| n.wrapping_sub(300)),
        1 => any::<u64>(),
    ]
}

fn timer_bits() -> impl Strategy<Value = u64> {
    let bits = prop::sample::subsequence(
        vec![LEVEL, INT_ENB, INT_ENB, PERIODIC, VAL_SET, MODE32, FSB_EN],
        0..=7,
    );
    let gsi = prop_oneof![Just(2u64), Just(8), 16u64..20, 0u64..32];
    (bits, gsi).prop_map(|(bits, gsi)| bits.into_iter().fold(route(gsi), |all, bit| all | bit))
}

fn write() -> impl Strategy<Value = Step> {
    let halves = prop_oneof![Just((true, true)), Just((true, false)), Just((false, true))];
    (offset(), value(), timer_bits(), halves).prop_map(|(offset, value, bits, (low, high))| {
        let value = match offset {
            // Mostly running.
            CONFIG => {
                if value.is_multiple_of(7) {
                    value
                } else {
                    value & LEGACY | ENABLE
                }
            }
            0x100.. if offset.is_multiple_of(0x20) => bits,
            _ => value,
        };
        Step::Write { offset, value, low, high }
    })
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => offset().prop_map(|offset| Step::Read { offset }),
        6 => write(),
        4 => prop_oneof![0u64..200, 0u64..30_000, Just(1 << 32), 0u64..1 << 40].prop_map(Step::Pass),
        1 => (0u64..1000).prop_map(Step::Back),
        1 => Just(Step::Expire),
    ]
}

struct Pair {
    bench: Bench,
    model: Model,
    legacy: bool,
}

impl Pair {
    fn new() -> Self {
        Self { bench: Bench::new(TIMERS), model: Model::new(TIMERS), legacy: false }
    }

    fn run(&mut self, step: &Step) {
        let now = self.bench.clock.get();
        match *step {
            Step::Read { offset: COUNTER } => {
                // Takes no lock: follows the clock, wherever it goes, and settles nothing.
                let moved = if self.model.config & ENABLE != 0 {
                    now.wrapping_sub(self.model.now)
                } else {
                    0
                };
                assert_eq!(self.bench.read(COUNTER), self.model.counter.wrapping_add(moved));
            }
            Step::Read { offset } => {
                self.observe();
                assert_eq!(self.bench.read(offset), self.model.read(offset), "{offset:#x}");
            }
            Step::Write { offset, value, low, high } => {
                self.observe();
                self.model.write(offset, value, low, high);
                match (low, high) {
                    (true, true) => self.bench.write(offset, value),
                    (true, false) => self.bench.write32(offset, value as u32),
                    _ => self.bench.write32(offset + 4, (value >> 32) as u32),
                }
            }
            Step::Pass(ticks) => {
                // Not further than the model can follow.
                let reached = self.model.clone().count(now + ticks, MODEL_STEPS);
                self.bench.clock.set(reached.min(now + ticks));
                let due = self.bench.recorder.deadline();
                if due.is_some_and(|due| due <= self.bench.clock.get()) {
                    self.run(&Step::Expire);
                }
            }
            Step::Back(ticks) => self.bench.clock.set(now.saturating_sub(ticks)),
            Step::Expire => {
                self.observe();
                self.model.expire();
                self.bench.hpet.expire();
            }
        }
        self.compare();
    }

    /// The model sees the time that the device is about to see.
    fn observe(&mut self) {
        self.model.count(self.bench.clock.get(), usize::MAX);
    }

    fn compare(&mut self) {
        let mut events = Vec::new();
        for output in self.bench.recorder.take() {
            match output {
                Output::Pulse(gsi) => events.push(Event::Pulse(gsi)),
                Output::Msi(address, data) => events.push(Event::Msi(address, data)),
                Output::Line(..) => {}
                Output::Legacy(on) => self.legacy = on,
            }
        }
        let mut expected = std::mem::take(&mut self.model.events);
        expected.sort();
        events.sort();
        assert_eq!(events, expected);
        let lines = self.model.lines.iter().fold(0, |lines, gsi| lines | 1u32 << gsi);
        assert_eq!(self.bench.recorder.lines(), lines);
        assert_eq!(self.legacy, self.model.legacy());
        assert_eq!(self.bench.recorder.deadline(), self.model.deadline(), "deadline");
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 1000,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn device_and_model_agree(steps in prop::collection::vec(step(), 1..60)) {
        let mut pair = Pair::new();
        for step in &steps {
            pair.run(step);
        }
        // At the end every register, whoever wrote it last.
        let registers = (0..TIMERS as u64)
            .flat_map(|timer| [timer_config(timer), comparator(timer), fsb(timer)])
            .chain([CONFIG, STATUS, COUNTER]);
        for offset in registers {
            pair.run(&Step::Read { offset });
        }
    }

    #[test]
    fn a_restored_device_goes_on_like_the_original(
        before in prop::collection::vec(step(), 1..40),
        later in 0u64..1 << 33,
    ) {
        let bench = Bench::new(TIMERS);
        for step in &before {
            match *step {
                Step::Write { offset, value, .. } => bench.write(offset, value),
                Step::Pass(ticks) => { bench.stop(ticks); }
                _ => {}
            }
        }
        let state = bench.hpet.state();
        let other = Bench::new(TIMERS);
        let recorder = || other.recorder.clone();
        let copy = devices::hpet::Hpet::from_state(
            state.clone(), other.clock.clone(), recorder(), recorder());
        prop_assert_eq!(copy.state(), state);
        prop_assert_eq!(other.recorder.lines(), bench.recorder.lines());
        bench.clock.advance(later as i64);
        other.clock.advance(later as i64);
        prop_assert_eq!(copy.state(), bench.hpet.state());
        let mut data = [0; 8];
        copy.read(COUNTER, &mut data);
        prop_assert_eq!(u64::from_le_bytes(data), bench.read(COUNTER));
    }
}
