//! One test per thing that is easy to get wrong.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use devices::bus::Device;
use devices::clock::Clock;
use devices::hpet::{
    CounterView, Hpet, IMAGE_WORDS, MAX_TIMERS, MIN_INTERVAL_10NS, Mirror, SHARE_10NS,
};
use devices::testing::Output::{self, Legacy, Line, Msi, Pulse};
use devices::testing::Recorder;

use crate::bench::*;

const WRAP32: u64 = 1 << 32;

/// A three-timer block whose counter runs from zero.
fn running() -> Bench {
    let bench = Bench::new(3);
    bench.write(CONFIG, ENABLE);
    bench
}

#[test]
fn capabilities_name_the_period_the_timers_and_the_abilities() {
    for (asked, timers) in [(0, 3), (3, 3), (8, 8), (32, 32), (99, 32)] {
        let capabilities = Bench::new(asked).read(CAPABILITIES);
        assert_eq!(capabilities >> 32, 10_000_000, "100 MHz in fs");
        assert_eq!(capabilities >> 16 & 0xFFFF, 0x8086);
        assert_eq!(capabilities & 0xE000, 0xA000, "legacy replacement, 64 bits");
        assert_eq!((capabilities >> 8 & 0x1F) + 1, timers);
        assert_ne!(capabilities & 0xFF, 0, "revision 0 is reserved");
    }
}

#[test]
fn read_only_and_reserved_bits_stay() {
    let bench = Bench::new(3);
    for offset in [CAPABILITIES, CONFIG, timer_config(0), 0x008, 0x018, 0x118, timer_config(3)] {
        bench.write(offset, u64::MAX);
    }
    assert_eq!(bench.read(CAPABILITIES), Bench::new(3).read(CAPABILITIES));
    assert_eq!(bench.read(CONFIG), 3);
    let fixed = 0x00FF_0104_0000_8030;
    let pending = VAL_SET;
    let writable = LEVEL | INT_ENB | PERIODIC | MODE32 | FSB_EN;
    assert_eq!(bench.read(timer_config(0)) & !route(0x1F), fixed | writable | pending);
    for offset in [0x008, 0x018, 0x118, timer_config(3), comparator(31), 0x3F8, 0xFF8] {
        assert_eq!(bench.read(offset), 0, "{offset:#x}");
    }
}

#[test]
fn a_route_that_the_timer_cannot_drive_is_not_taken() {
    let bench = Bench::new(3);
    bench.write(timer_config(2), route(20));
    for gsi in 0..32 {
        let possible = matches!(gsi, 2 | 8 | 16..=23);
        bench.write(timer_config(2), route(20));
        bench.write(timer_config(2), route(gsi));
        let taken = bench.read(timer_config(2)) >> 9 & 0x1F;
        assert_eq!(taken, if possible { gsi } else { 20 });
        assert_eq!(bench.read(timer_config(2)) >> (32 + gsi) & 1 != 0, possible, "ROUTE_CAP");
    }
}

#[test]
fn a_timer_without_a_route_goes_nowhere_and_is_not_armed() {
    let bench = running();
    bench.write(timer_config(0), INT_ENB);
    bench.write(comparator(0), 100);
    assert_eq!(bench.recorder.deadline(), None);
    assert_eq!(bench.run(200), []);
}

#[test]
fn the_counter_counts_10_ns_and_only_while_enabled() {
    let bench = Bench::new(3);
    bench.run(50);
    assert_eq!(bench.read(COUNTER), 0);
    bench.write(CONFIG, ENABLE);
    bench.run(123);
    assert_eq!(bench.read(COUNTER), 123);
    assert_eq!((bench.read32(COUNTER), bench.read32(COUNTER + 4)), (123, 0));
    bench.write(CONFIG, 0);
    bench.run(1000);
    assert_eq!(bench.read(COUNTER), 123, "halted");
    bench.write(CONFIG, ENABLE);
    bench.run(1);
    assert_eq!(bench.read(COUNTER), 124);
}

#[test]
fn the_counter_can_be_written_whole_or_by_halves_halted_or_running() {
    let bench = Bench::new(3);
    for config in [0, ENABLE] {
        bench.write(CONFIG, config);
        bench.write(COUNTER, 0x1111_2222_3333_4444);
        assert_eq!(bench.read(COUNTER), 0x1111_2222_3333_4444);
        bench.write32(COUNTER, 0xFFFF_FFFE);
        assert_eq!(bench.read(COUNTER), 0x1111_2222_FFFF_FFFE);
        bench.write32(COUNTER + 4, 7);
        assert_eq!(bench.read(COUNTER), 0x7_FFFF_FFFE);
    }
    bench.run(2);
    assert_eq!(bench.read(COUNTER), 0x8_0000_0000, "the carry is not lost");
    bench.write(COUNTER, u64::MAX);
    bench.run(1);
    assert_eq!(bench.read(COUNTER), 0);
}

#[test]
fn a_write_to_the_counter_moves_the_matches() {
    let bench = running();
    bench.write(timer_config(0), INT_ENB | route(16));
    bench.write(comparator(0), 1000);
    bench.write(COUNTER, 900);
    assert_eq!(bench.run(200), [(100, Pulse(16))]);
}

#[test]
fn one_shot_fires_once_and_never_early() {
    let bench = running();
    bench.write(timer_config(0), INT_ENB | route(16));
    bench.write(comparator(0), 1000);
    assert_eq!(bench.run(999), []);
    bench.hpet.expire();
    assert_eq!(bench.recorder.take(), []);
    assert_eq!(bench.run(1), [(1000, Pulse(16))]);
    assert_eq!(bench.recorder.deadline(), None);
    assert_eq!(bench.run(WRAP32 * 2), []);
}

#[test]
fn one_shot_in_32_bit_mode_fires_again_at_every_wrap() {
    let bench = running();
    bench.write(timer_config(0), INT_ENB | MODE32 | route(16));
    bench.write(comparator(0), 1000);
    let expected = [0, 1, 2].map(|wraps| (1000 + wraps * WRAP32, Pulse(16)));
    assert_eq!(bench.run(1000 + 2 * WRAP32), expected);
}

#[test]
fn in_32_bit_mode_the_high_half_of_the_comparator_does_not_exist() {
    let bench = running();
    bench.write(COUNTER, 0x5_0000_0000);
    bench.write(timer_config(0), INT_ENB | MODE32 | route(16));
    bench.write(comparator(0), 0xAAAA_BBBB_0000_0064);
    assert_eq!(bench.read(comparator(0)), 100);
    bench.write32(comparator(0) + 4, 0xFFFF_FFFF);
    assert_eq!(bench.read(comparator(0)), 100);
    assert_eq!(bench.run(100), [(100, Pulse(16))]);
}

#[test]
fn a_32_bit_periodic_comparator_wraps() {
    let bench = Bench::new(3);
    bench.write(COUNTER, 0xFFFF_FF00);
    bench.write(timer_config(0), INT_ENB | PERIODIC | MODE32 | VAL_SET | route(16));
    bench.write32(comparator(0), 0xFFFF_FFF0);
    bench.write32(comparator(0), 20_000);
    bench.write(CONFIG, ENABLE);
    let first = 0xF0;
    let expected = [0, 1, 2].map(|n| (first + n * 20_000, Pulse(16)));
    assert_eq!(bench.run(first + 40_000), expected);
    assert_eq!(bench.read(comparator(0)), 0xFFFF_FFF0 + 60_000 - WRAP32);
}

#[test]
fn switching_to_32_bit_mode_cuts_the_comparator() {
    let bench = running();
    bench.write(timer_config(0), INT_ENB | route(16));
    bench.write(comparator(0), 0x7_0000_0010);
    bench.write(timer_config(0), INT_ENB | MODE32 | route(16));
    assert_eq!(bench.read(comparator(0)), 0x10);
    assert_eq!(bench.run(0x10), [(0x10, Pulse(16))]);
    bench.write(timer_config(0), INT_ENB | route(16));
    assert_eq!(bench.read(comparator(0)), 0x10, "what is cut is gone");
}

/// Where the next match is, and the period that follows, as the guest would find out.
fn first_match_and_period(bench: &Bench) -> (u64, u64) {
    let first = bench.read(comparator(0));
    bench.write(COUNTER, first.wrapping_sub(1));
    bench.write(CONFIG, ENABLE);
    bench.run(1);
    (first, bench.read(comparator(0)).wrapping_sub(first))
}

#[test]
fn val_set_covers_both_halves_of_an_8_byte_write() {
    let bench = Bench::new(3);
    bench.write(timer_config(0), PERIODIC | VAL_SET);
    bench.write(comparator(0), 0x1_0000_0064);
    bench.write(comparator(0), 0x2_0000_0032);
    assert_eq!(first_match_and_period(&bench), (0x1_0000_0064, 0x2_0000_0032));
}

#[test]
fn val_set_covers_two_4_byte_writes_in_both_orders() {
    let (low, high) = (comparator(0), comparator(0) + 4);
    for order in [[(low, 0x64), (high, 1)], [(high, 1), (low, 0x64)]] {
        for set_again in [false, true] {
            let bench = Bench::new(3);
            for (half, value) in order {
                // The specification's example sets the bit before each half; once is enough.
                if set_again || half == order[0].0 {
                    bench.write(timer_config(0), PERIODIC | VAL_SET);
                }
                bench.write32(half, value);
            }
            assert_eq!(bench.read(timer_config(0)) & VAL_SET, if set_again { VAL_SET } else { 0 });
            bench.write(timer_config(0), PERIODIC);
            bench.write32(low, 0x32);
            bench.write32(high, 2);
            assert_eq!(first_match_and_period(&bench), (0x1_0000_0064, 0x2_0000_0032));
        }
    }
}

#[test]
fn val_set_ends_when_a_half_is_written_again() {
    // As Linux does on a 64-bit timer: one low half for the comparator, one for the period.
    let bench = Bench::new(3);
    bench.write(timer_config(0), PERIODIC | VAL_SET);
    bench.write32(comparator(0), 0x64);
    bench.write32(comparator(0), 0x32);
    bench.write32(comparator(0) + 4, 0);
    let all_ones_above = 0xFFFF_FFFF_0000_0000;
    assert_eq!(first_match_and_period(&bench), (all_ones_above | 0x64, 0x32));
}

#[test]
fn without_val_set_a_periodic_comparator_stays_and_only_the_period_changes() {
    let bench = running();
    bench.write(timer_config(0), INT_ENB | PERIODIC | VAL_SET | route(16));
    bench.write(comparator(0), 50_000);
    bench.write(comparator(0), 20_000);
    assert_eq!(bench.read(comparator(0)), 50_000);
    assert_eq!(bench.run(70_000), [(50_000, Pulse(16)), (70_000, Pulse(16))]);
    assert_eq!(bench.read(comparator(0)), 90_000);
}

#[test]
fn one_write_with_val_set_is_also_the_period() {
    // §2.3.9.2.2: a match adds the last value written.
    let bench = running();
    bench.write(timer_config(0), INT_ENB | PERIODIC | VAL_SET | route(16));
    bench.write(comparator(0), 30_000);
    let expected = [1, 2, 3].map(|n| (n * 30_000, Pulse(16)));
    assert_eq!(bench.run(90_000), expected);
}

#[test]
fn val_set_does_nothing_to_a_one_shot_timer() {
    let bench = running();
    bench.write(timer_config(0), VAL_SET | route(16));
    assert_eq!(bench.read(timer_config(0)) & VAL_SET, 0);
    bench.write(comparator(0), 5);
    bench.write(comparator(0), 7);
    assert_eq!(bench.read(comparator(0)), 7);
}

#[test]
fn an_edge_timer_leaves_the_status_alone() {
    let bench = running();
    bench.write(timer_config(0), INT_ENB | route(16));
    bench.write(comparator(0), 10);
    assert_eq!(bench.run(20), [(10, Pulse(16))]);
    assert_eq!(bench.read(STATUS), 0);
}

#[test]
fn level_holds_line_and_status_until_cleared_and_sleeps_meanwhile() {
    let bench = running();
    bench.write(timer_config(0), INT_ENB | PERIODIC | VAL_SET | LEVEL | route(16));
    bench.write(comparator(0), 20_000);
    assert_eq!(bench.run(90_000), [(20_000, Line(16, true))]);
    assert_eq!(bench.recorder.deadline(), None, "nothing to deliver while it is pending");
    assert_eq!(bench.read(STATUS), 1);
    bench.write(STATUS, !1);
    assert_eq!((bench.read(STATUS), bench.recorder.lines()), (1, 1 << 16), "only a one clears");
    bench.write(STATUS, 1);
    assert_eq!((bench.read(STATUS), bench.recorder.take()), (0, vec![Line(16, false)]));
    assert_eq!(bench.run(20_000), [(100_000, Line(16, true))], "in phase");
}

#[test]
fn level_to_edge_lowers_the_line_and_clears_the_status() {
    let bench = running();
    bench.write(timer_config(0), INT_ENB | LEVEL | route(16));
    bench.write(comparator(0), 10);
    bench.run(10);
    bench.write(timer_config(0), INT_ENB | route(16));
    assert_eq!(bench.recorder.take(), [Line(16, false)]);
    assert_eq!(bench.read(STATUS), 0);
    bench.write(timer_config(0), INT_ENB | LEVEL | route(16));
    assert_eq!(bench.recorder.take(), []);
}

#[test]
fn enabling_the_interrupt_with_its_status_set_raises() {
    let bench = running();
    bench.write(timer_config(1), LEVEL | route(17));
    bench.write(comparator(1), 10);
    assert_eq!(bench.recorder.deadline(), None);
    assert_eq!(bench.run(20), []);
    assert_eq!(bench.read(STATUS), 2, "the status works without the interrupt");
    bench.write(timer_config(1), LEVEL | INT_ENB | route(17));
    assert_eq!(bench.recorder.take(), [Line(17, true)]);
    bench.write(timer_config(1), LEVEL | route(17));
    assert_eq!(bench.recorder.take(), [Line(17, false)]);
    assert_eq!(bench.read(STATUS), 2);
}

#[test]
fn clearing_enable_lowers_the_line_and_keeps_the_status() {
    let bench = running();
    bench.write(timer_config(0), INT_ENB | LEVEL | route(16));
    bench.write(comparator(0), 10);
    bench.run(10);
    bench.write(CONFIG, 0);
    assert_eq!(bench.recorder.take(), [Line(16, false)]);
    assert_eq!(bench.read(STATUS), 1);
    bench.write(CONFIG, ENABLE);
    assert_eq!(bench.recorder.take(), [Line(16, true)]);
}

#[test]
fn changing_the_route_moves_a_line_that_is_high() {
    let bench = running();
    bench.write(timer_config(0), INT_ENB | LEVEL | route(18));
    bench.write(comparator(0), 10);
    bench.run(10);
    bench.write(timer_config(0), INT_ENB | LEVEL | route(17));
    assert_eq!(bench.recorder.take(), [Line(17, true), Line(18, false)]);
}

#[test]
fn a_shared_line_is_high_until_the_last_timer_lets_go() {
    let bench = running();
    for timer in [0, 1] {
        bench.write(timer_config(timer), INT_ENB | LEVEL | route(16));
        bench.write(comparator(timer), 10 + timer);
    }
    // While the line is high the second timer has nothing to tell, and is not armed.
    assert_eq!(bench.run(20), [(10, Line(16, true))]);
    bench.write(STATUS, 1);
    assert_eq!(bench.recorder.take(), []);
    assert_eq!(bench.read(STATUS), 2);
    bench.write(STATUS, 2);
    assert_eq!(bench.recorder.take(), [Line(16, false)]);
}

#[test]
fn every_timer_has_its_own_registers_status_bit_and_route() {
    let bench = Bench::new(MAX_TIMERS);
    bench.write(CONFIG, ENABLE);
    for timer in 0..32 {
        bench.write(timer_config(timer), INT_ENB | LEVEL | route(16 + timer % 8));
        bench.write(comparator(timer), 1000 * (timer + 1));
        bench.write(fsb(timer), timer << 32 | 0x55);
    }
    for timer in 0..32 {
        assert_eq!(bench.read(comparator(timer)), 1000 * (timer + 1));
        assert_eq!(bench.read(fsb(timer)), timer << 32 | 0x55);
        let gsi = 16 + timer as u32 % 8;
        assert_eq!(bench.run(1000), [(1000 * (timer + 1), Line(gsi, true))]);
        assert_eq!(bench.read(STATUS), 1 << timer);
        bench.write32(STATUS, 1 << timer);
        assert_eq!(bench.recorder.take(), [Line(gsi, false)]);
    }
}

#[test]
fn legacy_replacement_takes_the_lines_of_the_pit_and_the_rtc() {
    let bench = Bench::new(3);
    bench.write(CONFIG, LEGACY);
    assert_eq!(bench.recorder.take(), [], "needs ENABLE too (§2.3.5)");
    bench.write(CONFIG, LEGACY | ENABLE);
    assert_eq!(bench.recorder.take(), [Legacy(true)]);
    for timer in 0..3 {
        // Neither pin nor message of timers 0 and 1 matters.
        bench.write(timer_config(timer), INT_ENB | if timer < 2 { FSB_EN } else { route(20) });
        bench.write(comparator(timer), 10 + timer);
    }
    assert_eq!(bench.run(20), [(10, Pulse(2)), (11, Pulse(8)), (12, Pulse(20))]);
    bench.write(CONFIG, ENABLE);
    assert_eq!(bench.recorder.take(), [Legacy(false)]);
}

#[test]
fn leaving_legacy_replacement_moves_a_high_line_before_the_pit_is_back() {
    let bench = Bench::new(3);
    bench.write(CONFIG, LEGACY | ENABLE);
    bench.write(timer_config(0), INT_ENB | LEVEL | route(16));
    bench.write(comparator(0), 10);
    bench.recorder.take();
    assert_eq!(bench.run(10), [(10, Line(2, true))]);
    bench.write(CONFIG, ENABLE);
    assert_eq!(bench.recorder.take(), [Line(2, false), Line(16, true), Legacy(false)]);
}

#[test]
fn fsb_delivery_sends_the_message_that_the_guest_wrote() {
    let bench = running();
    bench.write(fsb(2), 0xFEE0_1004_0000_4031);
    bench.write(timer_config(2), INT_ENB | FSB_EN | PERIODIC | VAL_SET | route(16));
    bench.write(comparator(2), 20_000);
    let message = Msi(0xFEE0_1004, 0x4031);
    assert_eq!(bench.run(40_000), [(20_000, message), (40_000, message)]);
    assert_eq!(bench.read(STATUS), 0);
}

#[test]
fn a_level_message_is_sent_once_per_status() {
    let bench = running();
    bench.write(fsb(0), 0xFEE0_0000_0000_0031);
    bench.write(timer_config(0), INT_ENB | FSB_EN | LEVEL | PERIODIC | VAL_SET);
    bench.write(comparator(0), 20_000);
    let message = Msi(0xFEE0_0000, 0x31);
    assert_eq!(bench.run(70_000), [(20_000, message)]);
    bench.write(STATUS, 1);
    assert_eq!(bench.run(10_000), [(80_000, message)]);
}

#[test]
fn only_timers_that_can_interrupt_are_armed() {
    let ready = INT_ENB | route(16);
    for (config, timer, comparator_at, armed) in [
        (ENABLE, ready, 100, Some(100)),
        (0, ready, 100, None),
        (ENABLE, route(16), 100, None),
        (ENABLE, INT_ENB, 100, None),
        (ENABLE, INT_ENB | FSB_EN, 100, Some(100)),
        (ENABLE | LEGACY, INT_ENB, 100, Some(100)),
        (ENABLE, ready | PERIODIC, u64::MAX, Some(u64::MAX)),
    ] {
        let bench = Bench::new(3);
        bench.write(timer_config(0), timer);
        bench.write(comparator(0), comparator_at);
        bench.write(CONFIG, config);
        assert_eq!(bench.recorder.deadline(), armed, "{config:#x} {timer:#x}");
        bench.write(CONFIG, 0);
        assert_eq!(bench.recorder.deadline(), None, "halted");
    }
}

#[test]
fn the_earliest_timer_is_armed() {
    let bench = running();
    for (timer, at) in [(0, 300), (1, 100), (2, 200)] {
        bench.write(timer_config(timer), INT_ENB | route(16 + timer));
        bench.write(comparator(timer), at);
    }
    assert_eq!(bench.run(300), [(100, Pulse(17)), (200, Pulse(18)), (300, Pulse(16))]);
}

#[test]
fn a_comparator_in_the_past_or_at_the_present_waits_for_the_wrap() {
    for past in [0, 1, 999, 1000] {
        for (mode, expected) in [(0, None), (MODE32, Some(past + WRAP32))] {
            let bench = running();
            bench.run(1000);
            bench.write(timer_config(0), INT_ENB | mode | route(16));
            bench.write(comparator(0), past);
            assert_eq!(bench.recorder.deadline(), expected);
            assert_eq!(bench.stop(0), []);
        }
    }
}

#[test]
fn missed_ticks_are_not_replayed_after_a_stop() {
    let bench = running();
    let period = 100_000;
    bench.write(timer_config(0), INT_ENB | PERIODIC | VAL_SET | route(16));
    bench.write(comparator(0), period);
    assert_eq!(bench.run(period).len(), 1);
    // 60 s and a bit: 60 000 ticks are one, and the next comes in phase.
    assert_eq!(bench.stop(60_000 * period + 77), [Pulse(16)]);
    assert_eq!(bench.read(comparator(0)), 60_002 * period);
    assert_eq!(bench.run(period - 77), [(60_002 * period, Pulse(16))]);
}

#[test]
fn a_periodic_timer_that_is_started_late_keeps_its_phase() {
    for mode in [0, MODE32] {
        for (late, next) in [(0, 20_100), (1, 20_100), (50_000, 60_100), (99_999_999, 100_000_100)]
        {
            let bench = running();
            bench.run(100 + late);
            bench.write(timer_config(0), INT_ENB | PERIODIC | VAL_SET | mode | route(16));
            bench.write(comparator(0), 100);
            bench.write(comparator(0), 20_000);
            assert_eq!(bench.recorder.take(), [], "no tick for the past");
            assert_eq!(bench.recorder.deadline(), Some(next), "{late} ticks late");
        }
    }
    // A second or more is no late start but a comparator in the past.
    let bench = running();
    bench.run(100_000_100);
    bench.write(timer_config(0), INT_ENB | PERIODIC | VAL_SET | MODE32 | route(16));
    bench.write(comparator(0), 100);
    bench.write(comparator(0), 20_000);
    assert_eq!(bench.recorder.deadline(), Some(100 + WRAP32));
}

#[test]
fn period_0_matches_at_the_wrap_only() {
    for (mode, armed) in [(0, None), (MODE32, Some(100 + WRAP32))] {
        let bench = running();
        bench.write(timer_config(0), INT_ENB | PERIODIC | VAL_SET | mode | route(16));
        bench.write(comparator(0), 100);
        bench.write(comparator(0), 0);
        assert_eq!(bench.run(100), [(100, Pulse(16))]);
        assert_eq!(bench.recorder.deadline(), armed);
        assert_eq!(bench.read(comparator(0)), 100);
    }
}

#[test]
fn tiny_periods_wake_the_timer_thread_at_the_minimum_interval() {
    for period in [1, 2, 7, 999] {
        let bench = running();
        bench.write(timer_config(0), INT_ENB | PERIODIC | VAL_SET | route(16));
        bench.write(comparator(0), period);
        let fired = bench.run(10 * MIN_INTERVAL_10NS);
        assert!(matches!(fired.len(), 10 | 11), "{} interrupts in 1 ms", fired.len());
        for pair in fired.windows(2) {
            assert!(pair[1].0 - pair[0].0 >= MIN_INTERVAL_10NS);
        }
        let now = bench.clock.get();
        assert!(now < bench.read(comparator(0)) && bench.read(comparator(0)) <= now + period);
    }
}

#[test]
fn all_32_timers_at_one_tick_are_bounded_work() {
    let bench = Bench::new(MAX_TIMERS);
    for timer in 0..32 {
        bench.write(timer_config(timer), INT_ENB | PERIODIC | VAL_SET | route(16));
        bench.write(comparator(timer), 1);
    }
    bench.write(CONFIG, ENABLE);
    bench.recorder.take();
    let (mut expiries, mut interrupts) = (0, 0);
    let second = 100_000_000;
    while let Some(deadline) = bench.recorder.deadline().filter(|deadline| *deadline <= second) {
        let (reads, calls) = (bench.clock.reads(), bench.recorder.deadline_calls());
        bench.clock.set(deadline);
        bench.hpet.expire();
        // The work of one expiry: one look at the clock, one deadline, an interrupt per timer.
        assert_eq!(bench.clock.reads() - reads, 1);
        assert_eq!(bench.recorder.deadline_calls() - calls, 1);
        let fired = bench.recorder.take().len();
        assert!((1..=MAX_TIMERS).contains(&fired));
        interrupts += fired;
        expiries += 1;
    }
    let spacing = SHARE_10NS * MAX_TIMERS as u64;
    assert_eq!(expiries, (second - 1) / spacing + 1);
    assert!(interrupts <= 100_032, "{interrupts} interrupts in a second");
}

#[test]
fn extreme_values_do_not_panic() {
    let values = [0, 1, 1 << 31, WRAP32 - 1, WRAP32, 1 << 63, u64::MAX - 1, u64::MAX];
    for start in [0, u64::MAX - 1, u64::MAX] {
        for counter in values {
            for first in values {
                for period in values {
                    for mode in [0, MODE32] {
                        let bench = Bench::new(3);
                        bench.clock.set(start);
                        bench.write(COUNTER, counter);
                        let config = INT_ENB | PERIODIC | VAL_SET | mode | route(16);
                        bench.write(timer_config(0), config);
                        bench.write(comparator(0), first);
                        bench.write(comparator(0), period);
                        bench.write(CONFIG, ENABLE);
                        for now in [start / 2, u64::MAX / 2, u64::MAX, 0] {
                            bench.clock.set(now);
                            bench.hpet.expire();
                            bench.read(comparator(0));
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn a_clock_that_runs_backwards_does_not_fire_twice() {
    let bench = running();
    bench.write(timer_config(0), INT_ENB | route(16));
    bench.write(comparator(0), 1000);
    assert_eq!(bench.run(1000).len(), 1);
    bench.clock.set(500);
    bench.write(timer_config(0), INT_ENB | route(17));
    assert_eq!(bench.run(1000), []);
}

#[test]
fn an_access_before_the_timer_thread_delivers_what_is_due() {
    let bench = running();
    bench.write(timer_config(0), INT_ENB | route(16));
    bench.write(comparator(0), 1000);
    bench.clock.set(1500);
    // The match came before the guest switched the interrupt off.
    bench.write(timer_config(0), route(16));
    assert_eq!(bench.recorder.take(), [Pulse(16)]);
    assert_eq!(bench.recorder.deadline(), None);
}

#[test]
fn writes_of_other_widths_do_nothing_and_reads_are_those_of_memory() {
    let bench = Bench::new(3);
    bench.write(COUNTER, 0x8877_6655_4433_2211);
    for (offset, len) in [(0xF0, 1), (0xF0, 2), (0xF2, 4), (0xF4, 8), (0xF1, 1)] {
        bench.hpet.write(offset, &[0xFF; 8][..len]);
    }
    assert_eq!(bench.read(COUNTER), 0x8877_6655_4433_2211);
    let mut data = [0; 3];
    bench.hpet.read(0xF3, &mut data);
    assert_eq!(data, [0x44, 0x55, 0x66]);
    let mut data = [0xAA; 8];
    bench.hpet.read(0xF4, &mut data);
    assert_eq!(data, [0x55, 0x66, 0x77, 0x88, 0, 0, 0, 0]);
}

#[test]
fn linux_clockevent_ticks_at_its_rate() {
    let bench = Bench::new(3);
    // hpet_enable: stop, zero, start, and see it move.
    bench.write32(CONFIG, 0);
    bench.write32(COUNTER, 0);
    bench.write32(COUNTER + 4, 0);
    bench.write32(CONFIG, ENABLE as u32);
    bench.run(1000);
    assert_ne!(bench.read32(COUNTER), 0);
    bench.write32(CONFIG, (ENABLE | LEGACY) as u32);
    // hpet_clkevt_set_state_periodic at CONFIG_HZ=250.
    let delta = 400_000;
    let start = bench.read32(COUNTER);
    let config = bench.read32(timer_config(0));
    let periodic = (INT_ENB | PERIODIC | VAL_SET | MODE32) as u32;
    bench.write32(timer_config(0), config | periodic);
    bench.write32(comparator(0), start + delta);
    bench.run(100);
    bench.write32(comparator(0), delta);
    bench.recorder.take();
    let ticks = bench.run(100_000_000);
    assert_eq!(ticks.len(), 250);
    assert!(ticks.iter().all(|(_, output)| *output == Pulse(2)));
    // Oneshot, then shutdown: nothing stays armed.
    bench.write32(timer_config(0), config & !periodic | (INT_ENB | MODE32) as u32);
    bench.write32(comparator(0), bench.read32(COUNTER) + 5000);
    assert_eq!(bench.run(5000).len(), 1);
    bench.write32(timer_config(0), config & !(INT_ENB as u32));
    assert_eq!(bench.recorder.deadline(), None);
}

#[test]
fn state_survives_a_round_trip_to_another_timeline() {
    let bench = running();
    bench.write(timer_config(0), INT_ENB | LEVEL | route(16));
    bench.write(comparator(0), 50);
    bench.write(timer_config(1), INT_ENB | PERIODIC | VAL_SET | route(17));
    bench.write(comparator(1), 100_000);
    bench.write(timer_config(2), PERIODIC | VAL_SET);
    bench.write32(comparator(2), 1);
    bench.run(250_000);
    let state = bench.hpet.state();

    let other = Bench::new(3);
    other.clock.set(7_000_000);
    let copy = Hpet::from_state(
        state.clone(),
        other.clock.clone(),
        other.recorder.clone(),
        other.recorder.clone(),
    );
    assert_eq!(copy.state(), state);
    assert_eq!(copy.counter(), 250_000);
    assert_eq!(other.recorder.take(), [Line(16, true)], "lines follow from the state");
    assert_eq!(other.recorder.deadline(), Some(7_050_000));
}

#[test]
fn a_hostile_state_is_brought_into_range() {
    let bench = Bench::new(3);
    let mut state = bench.hpet.state();
    state.config = u64::MAX;
    state.status = u32::MAX;
    state.timers[0].config = u64::MAX;
    state.timers[0].val_set = u64::MAX;
    state.timers.resize(100, state.timers[0]);
    let clock = bench.clock.clone();
    let copy = Hpet::from_state(state, clock, bench.recorder.clone(), bench.recorder.clone());
    let state = copy.state();
    assert_eq!((state.config, state.timers.len()), (3, 32));
    assert_eq!(state.timers[0].comparator, 0xFFFF_FFFF);
}

/// A clock that goes on by itself: one tick per look.
#[derive(Default)]
struct Ticking(AtomicU64);

impl Clock for Ticking {
    fn now_10ns(&self) -> u64 {
        self.0.fetch_add(1, Ordering::Relaxed)
    }
}

#[test]
fn a_match_while_the_counter_is_being_halted_is_not_lost() {
    let mut outcomes = [0, 0];
    for at in 1..40 {
        let recorder = Arc::new(Recorder::default());
        let clock = Arc::new(Ticking::default());
        let hpet = Hpet::new(3, clock, recorder.clone(), recorder.clone());
        let write = |offset, value: u64| hpet.write(offset, &value.to_le_bytes());
        write(timer_config(0), INT_ENB | route(16));
        write(comparator(0), at);
        write(CONFIG, ENABLE);
        write(CONFIG, 0);
        let fired = recorder.take() == [Pulse(16)];
        assert_eq!(fired, hpet.counter() >= at, "comparator {at}");
        outcomes[usize::from(fired)] += 1;
    }
    assert!(outcomes[0] > 0 && outcomes[1] > 0);
}

#[derive(Default)]
struct Page(Mutex<(Vec<u64>, Option<CounterView>, Vec<&'static str>)>);

impl Mirror for Page {
    fn hold_counter(&self) {
        self.0.lock().expect("no test panics with it").2.push("hold");
    }

    fn update(&self, image: &[u64; IMAGE_WORDS], counter: CounterView) {
        let mut page = self.0.lock().expect("no test panics with it");
        page.0 = image.to_vec();
        page.1 = Some(counter);
        page.2.push("update");
    }
}

#[test]
fn a_mirror_reads_like_the_device_and_is_held_when_the_counter_changes() {
    let bench = Bench::new(5);
    let page = Arc::new(Page::default());
    let recorder = bench.recorder.clone();
    let hpet =
        Hpet::new(5, bench.clock.clone(), recorder.clone(), recorder).with_mirror(page.clone());
    let same = |what: &str| {
        let image = page.0.lock().unwrap().0.clone();
        for (word, offset) in image.into_iter().zip((0..).step_by(8)) {
            let mut data = [0; 8];
            hpet.read(offset, &mut data);
            assert_eq!(u64::from_le_bytes(data), word, "{what}: {offset:#x}");
        }
    };
    let calls = || std::mem::take(&mut page.0.lock().unwrap().2);
    let write = |offset, value: u64| hpet.write(offset, &value.to_le_bytes());

    same("after reset");
    calls();
    write(timer_config(4), LEVEL | route(16));
    assert_eq!(calls(), ["update"]);
    write(COUNTER, 1000);
    assert_eq!(calls(), ["hold", "update"]);
    write(CONFIG, ENABLE);
    assert_eq!(calls(), ["hold", "update"]);
    write(CONFIG, ENABLE | LEGACY);
    assert_eq!(calls(), ["update"]);
    write(comparator(4), 1500);
    same("armed");
    // No interrupt, but a status bit that the guest can see: the mirror needs the wake-up.
    assert_eq!(bench.recorder.deadline(), Some(500));
    bench.clock.set(500);
    hpet.expire();
    assert_eq!(page.0.lock().unwrap().0[STATUS as usize / 8], 1 << 4);
    same("expired");
    bench.clock.set(600);
    let view = page.0.lock().unwrap().1.unwrap();
    assert_eq!((view.at(600), hpet.counter()), (1600, 1600));
    write(CONFIG, 0);
    same("halted");
    assert_eq!(page.0.lock().unwrap().0[COUNTER as usize / 8], 1600);
}

#[test]
fn counter_reads_take_one_look_at_the_clock_and_touch_nothing_else() {
    let bench = running();
    bench.write(timer_config(0), INT_ENB | route(16));
    bench.write(comparator(0), 100);
    bench.clock.set(200);
    let (reads, calls) = (bench.clock.reads(), bench.recorder.deadline_calls());
    assert_eq!(bench.read(COUNTER), 200);
    assert_eq!(bench.read32(COUNTER), 200);
    assert_eq!(bench.clock.reads() - reads, 2);
    assert_eq!(bench.recorder.deadline_calls(), calls);
    assert_eq!(bench.recorder.take(), Vec::<Output>::new());
}
