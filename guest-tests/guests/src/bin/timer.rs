//! Arms one deadline after the other on every vCPU, and compares the TSC at the first instruction
//! of the handler with the deadline.
//!
//! Words: `mode=lapic-deadline|stimer` (lapic-deadline), `count` (1000 per vCPU), `min_us` (50),
//! `max_us` (10 000), `wait=halt|spin` (halt; `spin` stays in ring 3, and calls a timer lost that
//! is a second late, where `halt` would sleep on), `seed` (1), `cpus`, `apic`.
#![no_std]
#![no_main]

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use guests::args::Args;
use guests::clocks::{self, PAGE};
use guests::console::{Pair, ResultLine};
use guests::cpu::Cpu;
use guests::entry::TIMER_VECTOR;
use guests::histogram::Histogram;
use guests::random::Random;
use guests::smp::{self, Gate, Locked};
use guests::{guest_main, ring0};

guest_main!(main);

const GUEST: &str = "timer";
const MSR_TSC_DEADLINE: u32 = 0x6E0;
/// SDM vol. 3, 11.5.4.1: bits 18:17 of the timer's entry.
const TSC_DEADLINE_MODE: u32 = 2 << 17;
const MSR_STIMER0_CONFIG: u32 = 0x4000_00B0;
const MSR_STIMER0_COUNT: u32 = 0x4000_00B1;
/// TLFS 12.5.2: enable, auto-enable, direct mode, and the vector at bit 4.
const DIRECT: u64 = 1 | 1 << 3 | 1 << 12 | (TIMER_VECTOR as u64) << 4;

/// Set before the gate opens.
static TSC_HZ: AtomicU64 = AtomicU64::new(0);
static COUNT: AtomicU64 = AtomicU64::new(0);
static MIN_US: AtomicU64 = AtomicU64::new(0);
static MAX_US: AtomicU64 = AtomicU64::new(0);
static SEED: AtomicU64 = AtomicU64::new(0);
static STIMER: AtomicBool = AtomicBool::new(false);
static SPIN: AtomicBool = AtomicBool::new(false);
static GO: Gate = Gate::closed();

static OUTCOME: Locked<Outcome> = Locked::new(Outcome::new());

#[derive(Debug)]
struct Outcome {
    lateness_ns: Histogram,
    early: u64,
    lost: u64,
    extra: u64,
}

impl Outcome {
    const fn new() -> Self {
        Self { lateness_ns: Histogram::new(), early: 0, lost: 0, extra: 0 }
    }
}

fn main(args: &Args, cpu: &'static Cpu) {
    let mode = args.text("mode").unwrap_or("lapic-deadline");
    let wait = args.text("wait").unwrap_or("halt");
    let page = PAGE.enable();
    let stimer = match mode {
        "lapic-deadline" => false,
        "stimer" if page.is_some() && ring0::rdmsr(MSR_STIMER0_CONFIG).is_some() => true,
        "stimer" => panic!("mode=stimer: this machine has no synthetic timers"),
        other => panic!("mode={other}: lapic-deadline or stimer"),
    };
    let Some(tsc_hz) = clocks::tsc_hz() else {
        panic!("no clock tells the TSC's frequency");
    };
    TSC_HZ.store(tsc_hz, Ordering::Relaxed);
    COUNT.store(args.number("count", 1000), Ordering::Relaxed);
    MIN_US.store(args.number("min_us", 50), Ordering::Relaxed);
    MAX_US.store(args.number("max_us", 10_000), Ordering::Relaxed);
    SEED.store(args.number("seed", 1), Ordering::Relaxed);
    STIMER.store(stimer, Ordering::Relaxed);
    SPIN.store(wait == "spin", Ordering::Relaxed);

    let team = smp::start(args, cpu, |cpu| {
        GO.wait();
        arm_all(cpu);
    });
    GO.open();
    arm_all(cpu);
    team.join();

    OUTCOME.with(|outcome| {
        let ns = &outcome.lateness_ns;
        ResultLine::new(GUEST)
            .text("mode", mode)
            .text("wait", wait)
            .number("cpus", team.count)
            .number("armed", u64::from(team.count) * COUNT.load(Ordering::Relaxed))
            .number("fired", ns.total() + outcome.early)
            .number("early", outcome.early)
            .number("lost", outcome.lost)
            .number("extra", outcome.extra)
            .number("ns_p50", ns.quantile(500))
            .number("ns_p99", ns.quantile(990))
            .number("ns_p999", ns.quantile(999))
            .number("ns_max", ns.max())
            .list("histogram_ns", ns.buckets().map(|(start, count)| Pair(start, count)))
            .end();
    });
}

fn arm_all(cpu: &'static Cpu) {
    let tsc_hz = TSC_HZ.load(Ordering::Relaxed);
    let stimer = STIMER.load(Ordering::Relaxed);
    let spin = SPIN.load(Ordering::Relaxed);
    let (min_us, max_us) = (MIN_US.load(Ordering::Relaxed), MAX_US.load(Ordering::Relaxed));
    let mut random = Random(SEED.load(Ordering::Relaxed) + u64::from(cpu.index));
    let mut outcome = Outcome::new();
    if !stimer {
        smp::apic().set_timer_entry(TSC_DEADLINE_MODE | u32::from(TIMER_VECTOR));
    } else if ring0::wrmsr(MSR_STIMER0_CONFIG, DIRECT).is_none() {
        panic!("mode=stimer: no direct mode");
    }
    if spin {
        ring0::enable_interrupts();
    }
    for _ in 0..COUNT.load(Ordering::Relaxed) {
        let us = min_us + random.below(max_us.saturating_sub(min_us) + 1);
        let seen = cpu.irq_count.load(Ordering::Acquire);
        let deadline = if stimer { arm_stimer(us) } else { arm_lapic(us, tsc_hz) };
        if spin {
            let give_up = deadline.wrapping_add(tsc_hz);
            while cpu.irq_count.load(Ordering::Acquire) == seen && clocks::tsc() < give_up {
                core::hint::spin_loop();
            }
        } else {
            ring0::wait_irq(&cpu.irq_count, seen);
        }
        match cpu.irq_count.load(Ordering::Acquire) - seen {
            0 => {
                outcome.lost += 1;
                continue;
            }
            fired => outcome.extra += fired - 1,
        }
        let fired = cpu.irq_tsc.load(Ordering::Relaxed);
        match fired.checked_sub(deadline) {
            None => outcome.early += 1,
            Some(late) => {
                let ns = u128::from(late) * 1_000_000_000 / u128::from(tsc_hz);
                outcome.lateness_ns.record(ns as u64);
            }
        }
    }
    OUTCOME.with(|all| {
        all.lateness_ns.merge(&outcome.lateness_ns);
        all.early += outcome.early;
        all.lost += outcome.lost;
        all.extra += outcome.extra;
    });
}

/// Returns the TSC at which the timer may fire.
fn arm_lapic(us: u64, tsc_hz: u64) -> u64 {
    let cycles = u128::from(us) * u128::from(tsc_hz) / 1_000_000;
    let deadline = clocks::tsc() + cycles as u64;
    // The switch of the timer's mode comes first: SDM vol. 3, 11.5.4.1.
    if ring0::wrmsr(MSR_TSC_DEADLINE, deadline).is_none() {
        panic!("mode=lapic-deadline: no IA32_TSC_DEADLINE");
    }
    deadline
}

/// Returns the first TSC whose reference time is not before the deadline.
fn arm_stimer(us: u64) -> u64 {
    let now = PAGE.read().or_else(clocks::msr).unwrap_or(0);
    let deadline = now + us * 10;
    if ring0::wrmsr(MSR_STIMER0_COUNT, deadline).is_none() {
        panic!("mode=stimer: no COUNT");
    }
    PAGE.first_tsc_of(deadline)
}
