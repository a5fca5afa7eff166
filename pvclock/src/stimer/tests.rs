use super::*;
use proptest::prelude::*;

const VECTOR: u8 = 0xED;
const DIRECT_VECTOR: u64 = DIRECT | (VECTOR as u64) << VECTOR_SHIFT;
const ONE_SHOT: u64 = DIRECT_VECTOR | AUTO_ENABLE;

fn at(ticks: u64) -> Ticks100ns {
    Ticks100ns(ticks)
}

fn timer(config: u64, count: u64, now: u64) -> Stimer {
    let mut timer = Stimer::default();
    timer.write_config(config, at(now)).unwrap();
    timer.write_count(count, at(now));
    timer
}

#[test]
fn a_one_shot_fires_once_and_never_early() {
    let mut timer = timer(ONE_SHOT, 1_000, 10);
    assert_eq!(timer.config, ONE_SHOT | ENABLE);
    assert_eq!(timer.due(), Some(at(1_000)));
    assert_eq!(timer.expire(at(999)), None);
    assert_eq!(timer.expire(at(1_000)), Some(VECTOR));
    assert_eq!(timer, Stimer { config: ONE_SHOT, count: 1_000, due: None });
    assert_eq!(timer.expire(at(u64::MAX)), None);
}

#[test]
fn a_past_deadline_is_due_at_once() {
    let mut timer = timer(ONE_SHOT, 1, 1_000_000);
    assert_eq!(timer.expire(at(1_000_000)), Some(VECTOR));
}

#[test]
fn count_0_disables_and_count_enables_only_with_auto_enable() {
    let mut auto = timer(ONE_SHOT, 1_000, 0);
    auto.write_count(0, at(5));
    assert_eq!(auto, Stimer { config: ONE_SHOT, count: 0, due: None });

    let mut manual = timer(DIRECT_VECTOR, 1_000, 0);
    assert_eq!(manual.due(), None);
    manual.write_config(DIRECT_VECTOR | ENABLE, at(5)).unwrap();
    assert_eq!(manual.due(), Some(at(1_000)));
    manual.write_count(0, at(6));
    manual.write_count(2_000, at(7));
    assert_eq!(manual, Stimer { config: DIRECT_VECTOR, count: 2_000, due: None });
}

#[test]
fn a_rearm_replaces_the_deadline_and_a_cancel_removes_it() {
    let mut timer = timer(ONE_SHOT, 1_000, 0);
    timer.write_count(2_000, at(900));
    assert_eq!(timer.expire(at(1_999)), None);
    assert_eq!(timer.expire(at(2_000)), Some(VECTOR));
    timer.write_count(3_000, at(2_001));
    timer.write_config(ONE_SHOT, at(2_500)).unwrap();
    assert_eq!(timer.expire(at(9_000)), None);
}

#[test]
fn a_periodic_timer_starts_when_enabled_and_skips_what_it_missed() {
    let mut timer = timer(ONE_SHOT | PERIODIC, 10_000, 3);
    assert_eq!(timer.due(), Some(at(10_003)));
    assert_eq!(timer.expire(at(10_002)), None);
    assert_eq!(timer.expire(at(10_050)), Some(VECTOR));
    assert_eq!(timer.due(), Some(at(20_003)));
    // A million periods later: one interrupt, the phase kept.
    assert_eq!(timer.expire(at(10_000_020_004)), Some(VECTOR));
    assert_eq!(timer.due(), Some(at(10_000_030_003)));
    assert_eq!(timer.expire(at(10_000_020_004)), None);
    assert_eq!(timer.config & ENABLE, ENABLE);
}

#[test]
fn a_tiny_period_is_thinned_out() {
    let mut timer = timer(ONE_SHOT | PERIODIC, 7, 0);
    let mut fired = 0;
    for now in 0..10 * MIN_PERIOD {
        if timer.expire(at(now)).is_some() {
            assert_eq!(now % 7, 0);
            fired += 1;
        }
    }
    assert_eq!(fired, 9); // every 504 ticks
}

#[test]
fn what_cannot_be_configured_faults_and_changes_nothing() {
    let before = timer(ONE_SHOT, 1_000, 0);
    for bit in (13..=15).chain(20..64) {
        let mut timer = before;
        let config = ONE_SHOT | 1 << bit;
        assert_eq!(timer.write_config(config, at(1)), Err(InvalidConfig(config)));
        assert_eq!(timer, before);
    }
    for vector in 0..FIRST_VALID_VECTOR {
        let mut timer = before;
        let config = DIRECT | u64::from(vector) << VECTOR_SHIFT;
        assert!(timer.write_config(config, at(1)).is_err());
        assert_eq!(timer, before);
    }
    let mut timer = before;
    assert!(timer.write_config(DIRECT | 16 << VECTOR_SHIFT, at(1)).is_ok());
}

#[test]
fn a_message_timer_stays_disabled() {
    let sint_2 = 2 << 16;
    let mut timer = timer(ENABLE | AUTO_ENABLE | sint_2, 1_000, 0);
    assert_eq!(timer, Stimer { config: AUTO_ENABLE | sint_2, count: 1_000, due: None });
    assert_eq!(timer.expire(at(5_000)), None);
}

#[test]
fn the_end_of_time_is_no_panic() {
    for count in [1, 7, MIN_PERIOD, u64::MAX] {
        for now in [0, u64::MAX - 1, u64::MAX] {
            let mut timer = timer(ONE_SHOT | PERIODIC, count, now);
            timer.expire(at(u64::MAX));
            timer.expire(at(0));
        }
    }
    // A snapshot may claim anything.
    let mut odd =
        Stimer { config: ENABLE | PERIODIC | DIRECT_VECTOR, count: 0, due: Some(at(u64::MAX)) };
    assert_eq!(odd.expire(at(u64::MAX)), Some(VECTOR));
    assert_eq!(odd.due(), None);
}

/// The obvious model: flags as booleans and a walk over every single period.
#[derive(Default, Debug)]
struct Model {
    enabled: bool,
    periodic: bool,
    auto_enable: bool,
    direct: bool,
    vector: u8,
    count: u64,
    due: Option<u64>,
}

impl Model {
    fn write_config(&mut self, value: u64, now: u64) {
        let bit = |n: u32| value >> n & 1 == 1;
        (self.enabled, self.periodic, self.auto_enable, self.direct) =
            (bit(0), bit(1), bit(3), bit(12));
        self.vector = (value >> 4 & 0xFF) as u8;
        self.start(now);
    }

    fn write_count(&mut self, value: u64, now: u64) {
        self.count = value;
        self.enabled = value != 0 && (self.enabled || self.auto_enable);
        self.start(now);
    }

    fn start(&mut self, now: u64) {
        self.enabled &= self.direct;
        self.due = None;
        if self.enabled && self.count != 0 {
            self.due = Some(self.count);
            if self.periodic {
                self.due = Some(now);
                self.walk(now);
            }
        }
    }

    fn walk(&mut self, now: u64) {
        let pause = if self.count < MIN_PERIOD { MIN_PERIOD } else { 1 };
        while self.due.unwrap() < now + pause {
            self.due = Some(self.due.unwrap() + self.count);
        }
    }

    fn expire(&mut self, now: u64) -> Option<u8> {
        if self.due? > now {
            return None;
        }
        if self.periodic {
            self.walk(now);
        } else {
            self.due = None;
            self.enabled = false;
        }
        Some(self.vector)
    }
}

#[derive(Clone, Debug)]
enum Operation {
    Config(u64),
    Count(u64),
    Expire,
}

fn operation() -> impl Strategy<Value = Operation> {
    let config = (0u64..16, any::<bool>(), 16u64..256, 0u64..16).prop_map(
        |(flags, direct, vector, sint)| {
            flags | u64::from(direct) << 12 | vector << VECTOR_SHIFT | sint << 16
        },
    );
    prop_oneof![
        2 => config.prop_map(Operation::Config),
        3 => prop_oneof![Just(0), 1u64..1_000, 1u64..100_000].prop_map(Operation::Count),
        5 => Just(Operation::Expire),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2048))]

    /// Time mostly goes forward, but a hostile caller may turn it back.
    #[test]
    fn it_behaves_as_the_model(
        steps in prop::collection::vec((operation(), -20_000i64..60_000), 1..200),
    ) {
        let (mut timer, mut model) = (Stimer::default(), Model::default());
        let mut now = 0u64;
        for (operation, passed) in steps {
            now = now.saturating_add_signed(passed);
            match operation {
                Operation::Config(value) => {
                    timer.write_config(value, at(now)).unwrap();
                    model.write_config(value, now);
                    prop_assert_eq!(timer.config & !ENABLE, value & !ENABLE);
                }
                Operation::Count(value) => {
                    timer.write_count(value, at(now));
                    model.write_count(value, now);
                    prop_assert_eq!(timer.count, value);
                }
                Operation::Expire => {
                    let due = timer.due();
                    let fired = timer.expire(at(now));
                    prop_assert_eq!(fired, model.expire(now));
                    // Never early, never lost.
                    prop_assert_eq!(fired.is_some(), due.is_some_and(|due| due <= at(now)));
                }
            }
            prop_assert_eq!(timer.due(), model.due.map(at));
            prop_assert_eq!(timer.config & ENABLE != 0, model.enabled);
        }
    }

    #[test]
    fn nothing_a_guest_writes_panics(
        steps in prop::collection::vec((any::<u64>(), any::<u64>(), any::<u64>()), 1..50),
    ) {
        let mut timer = Stimer::default();
        for (config, count, now) in steps {
            let _ = timer.write_config(config & !RESERVED | DIRECT_VECTOR, at(now));
            timer.write_count(count, at(now));
            if let Some(due) = timer.due() {
                prop_assert!(due > at(now) || timer.config & PERIODIC == 0);
            }
            timer.expire(at(now));
        }
    }
}
