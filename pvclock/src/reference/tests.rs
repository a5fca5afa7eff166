//! Checked against arbitrary-precision rationals, which share no code with the clock.

use super::*;
use num_bigint::BigInt;
use num_integer::Integer;
use proptest::prelude::*;

/// Exact `floor(units_per_tick × tsc × scale / 2^64) + units_per_tick × offset`.
fn exact(clock: &ReferenceClock, tsc: u64, units_per_tick: u64) -> BigInt {
    let product = BigInt::from(units_per_tick) * tsc * clock.scale();
    product.div_floor(&(BigInt::from(1) << 64)) + BigInt::from(units_per_tick) * clock.offset()
}

fn wrapped(value: &BigInt) -> u64 {
    let modulus = BigInt::from(1) << 64;
    u64::try_from(value.mod_floor(&modulus)).expect("below 2^64")
}

/// 10 MHz to 10 GHz, as often near the ends as anywhere, plus every real-life decade.
fn tsc_hz() -> impl Strategy<Value = u64> {
    prop_oneof![
        10_000_001u64..=10_000_000_000,
        10_000_001u64..=10_001_000,
        9_999_999_000u64..=10_000_000_000,
        1_000_000_000u64..=5_000_000_000,
    ]
}

/// TSC values of every magnitude up to 2^63.
fn tsc() -> impl Strategy<Value = u64> {
    (0u64..1 << 63, 0u32..63).prop_map(|(bits, shift)| bits >> shift)
}

fn any_clock() -> impl Strategy<Value = ReferenceClock> {
    (tsc_hz(), prop_oneof![any::<i64>(), -1_000i64..1_000]).prop_map(|(tsc_hz, offset)| {
        ReferenceClock::with_offset(tsc_hz, offset).expect("frequency in range")
    })
}

fn started_clock() -> impl Strategy<Value = (ReferenceClock, u64)> {
    (tsc_hz(), 0u64..1 << 62).prop_map(|(tsc_hz, start)| {
        (ReferenceClock::starting_at(tsc_hz, start).expect("frequency in range"), start)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]

    #[test]
    fn scale_is_the_floor_and_errs_below_1e_15(tsc_hz in tsc_hz()) {
        let clock = ReferenceClock::starting_at(tsc_hz, 0).unwrap();
        let ideal = BigInt::from(TICKS_PER_SECOND) << 64;
        let ours = BigInt::from(clock.scale()) * tsc_hz;
        let error = &ideal - &ours;
        prop_assert!(error >= BigInt::from(0) && error < BigInt::from(tsc_hz));
        prop_assert!(error * BigInt::from(10u64).pow(15) < ideal);
    }

    #[test]
    fn ticks_are_the_guests_formula(clock in any_clock(), tsc in tsc()) {
        prop_assert_eq!(clock.ticks(tsc).0, wrapped(&exact(&clock, tsc, 1)));
        prop_assert_eq!(clock.ticks_10ns(tsc), wrapped(&exact(&clock, tsc, 10)));
    }

    #[test]
    fn ticks_follow_the_ideal_time(tsc_hz in tsc_hz(), tsc in tsc()) {
        // Against tsc / f itself: at most the scale's share of error plus one floor.
        let clock = ReferenceClock::starting_at(tsc_hz, 0).unwrap();
        let ideal = (BigInt::from(tsc) * TICKS_PER_SECOND).div_floor(&BigInt::from(tsc_hz));
        let error = &ideal - BigInt::from(clock.ticks(tsc).0);
        let allowed = BigInt::from(1) + &ideal / BigInt::from(10u64).pow(15);
        prop_assert!(error >= BigInt::from(0) && error <= allowed, "{error} of {allowed}");
    }

    #[test]
    fn both_units_tell_the_same_time(clock in any_clock(), tsc in any::<u64>()) {
        let (coarse, fine) = (clock.ticks(tsc).0, clock.ticks_10ns(tsc));
        prop_assert!(fine.wrapping_sub(coarse.wrapping_mul(10)) < 10);
        if coarse < u64::MAX / 10 {
            prop_assert_eq!(fine / 10, coarse);
        }
    }

    #[test]
    fn it_starts_at_zero((clock, start) in started_clock()) {
        prop_assert_eq!(clock.ticks(start), Ticks100ns(0));
        prop_assert!(clock.ticks_10ns(start) < 10);
    }

    #[test]
    fn tsc_at_is_the_first_moment(clock in any_clock(), ticks in any::<u64>(), near in tsc()) {
        // Half of the cases aim at a moment that exists, where an error of one would show.
        for ticks in [ticks, clock.ticks(near).0] {
            let tsc = clock.tsc_at(Ticks100ns(ticks));
            if tsc < u64::MAX {
                prop_assert!(exact(&clock, tsc, 1) >= BigInt::from(ticks));
            }
            if tsc > 0 {
                prop_assert!(exact(&clock, tsc - 1, 1) < BigInt::from(ticks));
            }
        }
    }

    #[test]
    fn tsc_at_10ns_is_the_first_moment(clock in any_clock(), ticks in any::<u64>(), near in tsc()) {
        for ticks in [ticks, clock.ticks_10ns(near)] {
            let tsc = clock.tsc_at_10ns(ticks);
            if tsc < u64::MAX {
                prop_assert!(exact(&clock, tsc, 10) >= BigInt::from(ticks));
            }
            if tsc > 0 {
                prop_assert!(exact(&clock, tsc - 1, 10) < BigInt::from(ticks));
            }
        }
    }

    #[test]
    fn a_slope_change_never_steps_back(
        (old, start) in started_clock(), run in 0u64..1 << 50, ppm in -500i64..=500,
    ) {
        let at = start + run;
        let hz = old.tsc_hz() as i64;
        let new_hz = (hz + hz / 1_000_000 * ppm).max(10_000_001) as u64;
        let new = old.with_frequency(at, new_hz).unwrap();
        prop_assert!(new.ticks(at) >= old.ticks(at));
        prop_assert!(new.ticks(at).0 <= old.ticks(at).0 + 1);
        prop_assert!(new.ticks_10ns(at) >= old.ticks_10ns(at));
        prop_assert!(new.ticks_10ns(at) <= old.ticks_10ns(at) + 10);
        prop_assert!(new.ticks_10ns(at + 1) >= old.ticks_10ns(at));
    }

    #[test]
    fn no_step_back_anywhere_in_a_handover(
        (old, start) in started_clock(), run in 0u64..1 << 50, span in 0u64..1 << 24,
        ppm in -500i64..=500, inside in any::<u64>(),
    ) {
        let from = start + run;
        let hz = old.tsc_hz() as i64;
        let new_hz = (hz + hz / 1_000_000 * ppm).max(10_000_001) as u64;
        let new = old.with_frequency_within(from..=from + span, new_hz).unwrap();
        for tsc in [from, from + span, from + inside % (span + 1)] {
            prop_assert!(new.ticks(tsc) >= old.ticks(tsc));
            prop_assert!(new.ticks_10ns(tsc) >= old.ticks_10ns(tsc));
            // One tick, and the slopes' difference (≤ 500 ppm, in 10 ns units) over the span.
            let drift = (BigInt::from(span) * new.scale().abs_diff(old.scale()) * 10) >> 64;
            let ahead = new.ticks_10ns(tsc) - old.ticks_10ns(tsc);
            prop_assert!(BigInt::from(ahead) <= drift + 11);
        }
    }

    #[test]
    fn pauses_take_no_time_and_never_step_back(
        (clock, start) in started_clock(),
        spans in prop::collection::vec((0u64..1 << 40, 0u64..1 << 40), 1..100),
    ) {
        let (mut clock, mut tsc) = (clock, start);
        let mut last = clock.ticks_10ns(tsc);
        for (run, pause) in spans {
            let paused = tsc + run;
            let at_pause = clock.ticks_10ns(paused);
            prop_assert!(at_pause >= last);
            tsc = paused + pause;
            let stopped = clock.stopped(paused);
            prop_assert!(stopped.is_stopped());
            prop_assert_eq!(stopped.ticks_10ns(paused), stopped.ticks_10ns(tsc));
            prop_assert!((at_pause..=at_pause + 10).contains(&stopped.ticks_10ns(tsc)));
            clock = stopped.started(tsc);
            last = clock.ticks_10ns(tsc);
            prop_assert!(!clock.is_stopped());
            prop_assert!((stopped.ticks_10ns(tsc)..=at_pause + 20).contains(&last));
            prop_assert_eq!(last / 10, clock.ticks(tsc).0);
        }
    }

    #[test]
    fn words_round_trip(clock in any_clock()) {
        prop_assert_eq!(ReferenceClock::from_words(clock.to_words()), clock);
    }
}

#[test]
fn a_migration_to_a_younger_tsc_goes_on() {
    // The new host's TSC is far below the old one's, so the offset turns positive.
    let old = ReferenceClock::starting_at(3_000_000_000, 1 << 50).unwrap();
    let paused = (1 << 50) + 3_000_000_000;
    let new = old.stopped(paused).started(1000);
    assert_eq!(old.ticks(paused), Ticks100ns(TICKS_PER_SECOND));
    assert!(new.offset() > 0);
    assert!((0..=2).contains(&new.ticks(1000).since(old.ticks(paused))));
    assert_eq!(new.tsc_at(Ticks100ns(5)), 0);
}

#[test]
fn frequencies_at_the_edge() {
    assert_eq!(
        ReferenceClock::starting_at(10_000_000, 0),
        Err(UnsupportedFrequency { tsc_hz: 10_000_000 })
    );
    assert!(ReferenceClock::starting_at(10_000_001, 0).unwrap().scale() > u64::MAX - (1 << 41));
    assert!(ReferenceClock::starting_at(100_000_000_000, 0).is_ok());
    for tsc_hz in [0, 1, 100_000_000_001, u64::MAX] {
        let error = ReferenceClock::starting_at(tsc_hz, 0).unwrap_err();
        assert!(error.to_string().contains(&format!("{tsc_hz} Hz")));
    }
}

#[test]
fn known_values_at_3_ghz() {
    let clock = ReferenceClock::starting_at(3_000_000_000, 0).unwrap();
    assert_eq!(clock.scale(), 61_489_146_912_365_172); // floor(2^64 / 300)
    assert_eq!(clock.ticks(3_000_000_001), Ticks100ns(10_000_000));
    assert_eq!(clock.ticks_10ns(30), 0); // 30 cycles are 10 ns, less the scale's rounding
    assert_eq!(clock.ticks_10ns(31), 1);
    assert_eq!(clock.tsc_at(Ticks100ns(1)), 301);
    assert_eq!(Ticks100ns(12_345_678).to_string(), "1.2345678 s");
    assert_eq!(Ticks100ns(3).as_ns(), 300);
}
