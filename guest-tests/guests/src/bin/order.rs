//! A timestamp handed round all vCPUs through memory: whoever has it reads a clock and compares.
//!
//! Words: `hops` (100 000), `mix=page|msr|hpet|all` (all), `spin_cycles` (50 000: how long a vCPU
//! polls for its turn before it halts until the interrupt; with more vCPUs than the host has CPUs
//! 0 is best), `hpet_lag_ns` (0: how far a published HPET counter may be behind), `cpus`, `apic`.
//!
//! Page and MSR are one clock in one unit, so a later read by anybody may not be smaller. The
//! HPET counts from elsewhere in another unit: each read of it before (after) a read of the other
//! bounds the difference of the two from above (below), and the bounds must leave room for one.
#![no_std]
#![no_main]

use core::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};

use guests::apic::Delivery;
use guests::args::Args;
use guests::clocks::{self, Hpet, PAGE};
use guests::console::ResultLine;
use guests::cpu::Cpu;
use guests::entry::TIMER_VECTOR;
use guests::random::Random;
use guests::{guest_main, ring0, smp};

guest_main!(main);

const GUEST: &str = "order";
/// HPET ticks of 10 ns per unit of the reference clock.
const TICKS_PER_UNIT: i64 = 10;
const HPET_PERIOD_FS: u64 = 10_000_000;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Clock {
    Page,
    Msr,
    Hpet,
}

const MIXES: [(&str, &[Clock]); 4] = [
    ("page", &[Clock::Page]),
    ("msr", &[Clock::Msr]),
    ("hpet", &[Clock::Hpet]),
    ("all", &[Clock::Page, Clock::Msr, Clock::Hpet]),
];

/// Hops made so far; whose turn it is follows. All below belongs to the vCPU whose turn it is.
static TURN: AtomicU64 = AtomicU64::new(0);
static LAST_UNITS: AtomicU64 = AtomicU64::new(0);
static LAST_TICKS: AtomicU64 = AtomicU64::new(0);
static DIFFERENCE_MIN: AtomicI64 = AtomicI64::new(i64::MIN);
static DIFFERENCE_MAX: AtomicI64 = AtomicI64::new(i64::MAX);
static BACKWARD: AtomicU64 = AtomicU64::new(0);
static APART: AtomicU64 = AtomicU64::new(0);
static FALLBACKS: AtomicU64 = AtomicU64::new(0);

/// Set before the others start.
static HOPS: AtomicU64 = AtomicU64::new(0);
static MIX: AtomicU32 = AtomicU32::new(0);
static TOLERANCE_TICKS: AtomicI64 = AtomicI64::new(1);
static SPIN_CYCLES: AtomicU64 = AtomicU64::new(0);
static CPUS: AtomicU32 = AtomicU32::new(0);
static GO: smp::Gate = smp::Gate::closed();

fn main(args: &Args, cpu: &'static Cpu) {
    let name = args.text("mix").unwrap_or("all");
    let Some(mix) = MIXES.iter().position(|(known, _)| *known == name) else {
        panic!("mix={name}: page, msr, hpet or all");
    };
    let hpet = MIXES[mix].1.contains(&Clock::Hpet);
    let units = MIXES[mix].1.iter().any(|clock| *clock != Clock::Hpet);
    if units && PAGE.enable().is_none() {
        panic!("mix={name}: no reference TSC page");
    }
    if hpet && Hpet::find().map(Hpet::period_fs) != Some(HPET_PERIOD_FS) {
        panic!("mix={name}: no HPET of 100 MHz");
    }
    HOPS.store(args.number("hops", 100_000), Ordering::Relaxed);
    MIX.store(mix as u32, Ordering::Relaxed);
    TOLERANCE_TICKS.store(1 + (args.number("hpet_lag_ns", 0) / 10) as i64, Ordering::Relaxed);
    SPIN_CYCLES.store(args.number("spin_cycles", 50_000), Ordering::Relaxed);

    let team = smp::start(args, cpu, |cpu| {
        GO.wait();
        hand_round(cpu);
    });
    CPUS.store(team.count, Ordering::Relaxed);
    let start = clocks::tsc();
    GO.open();
    hand_round(cpu);
    let cycles = clocks::tsc().wrapping_sub(start);
    team.join();

    let line = ResultLine::new(GUEST)
        .text("mix", name)
        .number("cpus", team.count)
        .number("hops", TURN.load(Ordering::Relaxed))
        .number("backward", BACKWARD.load(Ordering::Relaxed))
        .number("page_fallbacks", FALLBACKS.load(Ordering::Relaxed))
        .number("cycles", cycles);
    if hpet && units {
        line.number("hpet_apart", APART.load(Ordering::Relaxed))
            .number("hpet_minus_page_min_ticks", DIFFERENCE_MIN.load(Ordering::Relaxed))
            .number("hpet_minus_page_max_ticks", DIFFERENCE_MAX.load(Ordering::Relaxed))
    } else {
        line
    }
    .end();
}

fn hand_round(cpu: &'static Cpu) {
    let (hops, cpus) = (HOPS.load(Ordering::Relaxed), CPUS.load(Ordering::Relaxed));
    let clocks = MIXES[MIX.load(Ordering::Relaxed) as usize].1;
    let next = Cpu::at((cpu.index + 1) % cpus);
    loop {
        let turn = wait_for_turn(cpu, cpus, hops);
        if turn >= hops {
            break;
        }
        // A random choice, so that every vCPU reads every clock after every other.
        let choice = Random(turn).below(clocks.len() as u64);
        hop(clocks[choice as usize]);
        TURN.store(turn + 1, Ordering::SeqCst);
        if turn + 1 < hops {
            wake(next);
        } else {
            (0..cpus).map(Cpu::at).for_each(wake);
        }
    }
}

/// Polls, then halts, until it is this vCPU's turn or all hops are made.
fn wait_for_turn(cpu: &'static Cpu, cpus: u32, hops: u64) -> u64 {
    let mine = |turn: u64| turn >= hops || turn % u64::from(cpus) == u64::from(cpu.index);
    let start = clocks::tsc();
    loop {
        let turn = TURN.load(Ordering::Acquire);
        if mine(turn) {
            return turn;
        }
        if clocks::tsc().wrapping_sub(start) < SPIN_CYCLES.load(Ordering::Relaxed) {
            core::hint::spin_loop();
            continue;
        }
        // Either this sees the new turn, or whoever made it sees the sleeper: both sides write
        // first and read then, in one total order.
        cpu.sleeping.store(true, Ordering::SeqCst);
        let turn = TURN.load(Ordering::SeqCst);
        if !mine(turn) {
            ring0::wait_irq(&TURN, turn);
        }
        cpu.sleeping.store(false, Ordering::Relaxed);
    }
}

fn wake(cpu: &'static Cpu) {
    if cpu.sleeping.load(Ordering::SeqCst) {
        let id = cpu.apic_id.load(Ordering::Relaxed);
        smp::apic().send(id, Delivery::Fixed(TIMER_VECTOR));
    }
}

fn hop(clock: Clock) {
    if clock == Clock::Hpet {
        let ticks = Hpet.counter();
        count(&BACKWARD, ticks < LAST_TICKS.load(Ordering::Relaxed));
        LAST_TICKS.store(ticks, Ordering::Relaxed);
        // This tick is not earlier than the start of the unit read before it.
        let units = LAST_UNITS.load(Ordering::Relaxed);
        if units != 0 {
            let difference = (ticks as i64).wrapping_sub(units as i64 * TICKS_PER_UNIT);
            bound(&DIFFERENCE_MAX, difference, i64::min);
        }
        return;
    }
    let page = if clock == Clock::Page { PAGE.read() } else { None };
    count(&FALLBACKS, clock == Clock::Page && page.is_none());
    let units = page.or_else(clocks::msr).unwrap_or(0);
    count(&BACKWARD, units < LAST_UNITS.load(Ordering::Relaxed));
    LAST_UNITS.store(units, Ordering::Relaxed);
    // The tick read before it is not later than the last one of this unit.
    let ticks = LAST_TICKS.load(Ordering::Relaxed);
    if ticks != 0 {
        let end = units as i64 * TICKS_PER_UNIT + TICKS_PER_UNIT - 1;
        bound(&DIFFERENCE_MIN, (ticks as i64).wrapping_sub(end), i64::max);
    }
}

fn count(counter: &AtomicU64, happened: bool) {
    if happened {
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

/// Tightens one bound of HPET − page, and counts it if the two then exclude each other.
fn bound(bound: &AtomicI64, difference: i64, choose: fn(i64, i64) -> i64) {
    let old = bound.load(Ordering::Relaxed);
    let new = choose(old, difference);
    bound.store(new, Ordering::Relaxed);
    let room = DIFFERENCE_MAX
        .load(Ordering::Relaxed)
        .saturating_add(TOLERANCE_TICKS.load(Ordering::Relaxed));
    count(&APART, new != old && DIFFERENCE_MIN.load(Ordering::Relaxed) > room);
}
