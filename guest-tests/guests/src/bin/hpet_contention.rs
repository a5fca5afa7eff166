//! All vCPUs read one clock, for a time. With `work` or `share_bp` each read is preceded by a
//! fixed computation: the mixed workload whose throughput on two clocks is to be compared.
//!
//! Words: `clock=hpet|tsc|page|acpi_pm` (hpet), `ms` (500), `work` (0: computation steps per read),
//! `share_bp` (0; else it chooses `work` so that one vCPU alone spends this many hundredths of a
//! percent of its time reading), `check_every` (16: every how many reads one is timed and compared
//! with the other vCPUs' reads), `cpus`, `apic`.
#![no_std]
#![no_main]

use core::hint::black_box;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use guests::args::Args;
use guests::clocks::{self, Hpet, PAGE};
use guests::console::ResultLine;
use guests::cpu::{Cpu, MAX_CPUS};
use guests::guest_main;
use guests::histogram::Histogram;
use guests::smp::{self, Gate, Locked};
use guests::stats::PerRead;

guest_main!(main);

const GUEST: &str = "hpet-contention";

type Read = fn() -> u64;

/// Their values never decrease, but for the PM timer, which wraps.
const CLOCKS: [(&str, Read); 4] = [
    ("hpet", || Hpet.counter()),
    ("tsc", clocks::tsc),
    ("page", || PAGE.read().unwrap_or(0)),
    ("acpi_pm", || clocks::pm_timer().unwrap_or(0).into()),
];

/// Set before the gate opens.
static CLOCK: AtomicU32 = AtomicU32::new(0);
static WORK: AtomicU64 = AtomicU64::new(0);
static CHECK_EVERY: AtomicU64 = AtomicU64::new(1);
static DURATION_CYCLES: AtomicU64 = AtomicU64::new(0);
static GO: Gate = Gate::closed();

/// No read that begins later may be below this.
static FLOOR: AtomicU64 = AtomicU64::new(0);
static BACKWARD: AtomicU64 = AtomicU64::new(0);
static COSTS: Locked<Histogram> = Locked::new(Histogram::new());
/// What each vCPU did, written by it at its end.
static READS: [AtomicU64; MAX_CPUS as usize] = [const { AtomicU64::new(0) }; MAX_CPUS as usize];
static CYCLES: [AtomicU64; MAX_CPUS as usize] = [const { AtomicU64::new(0) }; MAX_CPUS as usize];

fn main(args: &Args, cpu: &'static Cpu) {
    let name = args.text("clock").unwrap_or("hpet");
    let Some(clock) = CLOCKS.iter().position(|(known, _)| *known == name) else {
        panic!("clock={name}: hpet, tsc, page or acpi_pm");
    };
    let page = PAGE.enable();
    let present = match name {
        "hpet" => Hpet::find().is_some(),
        "page" => page.is_some(),
        "acpi_pm" => clocks::pm_timer().is_some(),
        _ => true,
    };
    if !present {
        panic!("clock={name}: this machine has none");
    }
    let Some(tsc_hz) = clocks::tsc_hz() else {
        panic!("no clock tells the TSC's frequency");
    };
    let read = CLOCKS[clock].1;
    let share_bp = args.number("share_bp", 0).min(10_000);
    let work = if share_bp == 0 { args.number("work", 0) } else { work_for(share_bp, read) };
    CLOCK.store(clock as u32, Ordering::Relaxed);
    WORK.store(work, Ordering::Relaxed);
    CHECK_EVERY.store(args.number("check_every", 16).max(1), Ordering::Relaxed);
    let duration = tsc_hz / 1000 * args.number("ms", 500);
    DURATION_CYCLES.store(duration, Ordering::Relaxed);

    let team = smp::start(args, cpu, |cpu| {
        GO.wait();
        measure(cpu);
    });
    GO.open();
    measure(cpu);
    team.join();

    let each = || (0..team.count as usize).map(|index| READS[index].load(Ordering::Relaxed));
    // Every vCPU's own rate over its own time: the last ones to stop have had it quieter.
    let rates = (0..team.count as usize).map(|index| {
        let cycles = CYCLES[index].load(Ordering::Relaxed).max(1);
        (u128::from(READS[index].load(Ordering::Relaxed)) * u128::from(tsc_hz) / u128::from(cycles))
            as u64
    });
    let rate: u64 = rates.sum();
    COSTS.with(|costs| {
        ResultLine::new(GUEST)
            .text("clock", name)
            .number("cpus", team.count)
            .number("work", work)
            .number("reads", each().sum::<u64>())
            .number("reads_per_s", rate)
            .list("reads_each", each())
            .number("backward", BACKWARD.load(Ordering::Relaxed))
            .number("timed", costs.total())
            .number("cycles_p50", costs.quantile(500))
            .number("cycles_p99", costs.quantile(990))
            .number("cycles_max", costs.max())
            .number("ns_p50", PerRead { total: costs.quantile(500), reads: 1 }.to_ns(tsc_hz))
            .number("ns_p99", PerRead { total: costs.quantile(990), reads: 1 }.to_ns(tsc_hz))
            .end();
    });
}

fn measure(cpu: &'static Cpu) {
    // One instance of the loop per clock, so that the read is inlined as in a kernel.
    match CLOCK.load(Ordering::Relaxed) {
        0 => measure_with(cpu, CLOCKS[0].1, true),
        1 => measure_with(cpu, CLOCKS[1].1, true),
        2 => measure_with(cpu, CLOCKS[2].1, true),
        _ => measure_with(cpu, CLOCKS[3].1, false),
    }
}

#[inline(always)]
fn measure_with(cpu: &'static Cpu, read: impl Fn() -> u64, ordered: bool) {
    let work = WORK.load(Ordering::Relaxed);
    let check_every = CHECK_EVERY.load(Ordering::Relaxed);
    let duration = DURATION_CYCLES.load(Ordering::Relaxed);
    let mut costs = Histogram::new();
    let (mut reads, mut backward, mut last) = (0_u64, 0_u64, 0_u64);
    let start = clocks::tsc();
    let cycles = loop {
        for _ in 1..check_every {
            compute(work);
            let value = read();
            backward += u64::from(value < last);
            last = value;
        }
        compute(work);
        let floor = FLOOR.load(Ordering::Acquire).max(last);
        let before = clocks::tsc();
        let value = read();
        let after = clocks::tsc();
        costs.record(after.wrapping_sub(before));
        backward += u64::from(value < floor);
        FLOOR.fetch_max(value, Ordering::Release);
        last = value;
        reads += check_every;
        let elapsed = after.wrapping_sub(start);
        if elapsed >= duration {
            break elapsed;
        }
    };
    READS[cpu.index as usize].store(reads, Ordering::Relaxed);
    CYCLES[cpu.index as usize].store(cycles, Ordering::Relaxed);
    if ordered {
        BACKWARD.fetch_add(backward, Ordering::Relaxed);
    }
    COSTS.with(|all| all.merge(&costs));
}

/// The fixed computation: `steps` of one dependent multiplication.
#[inline(always)]
fn compute(steps: u64) {
    let mut value = black_box(steps | 1);
    for _ in 0..steps {
        value = black_box(value.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    }
}

/// The steps that make one read take `share_bp` of 10 000 parts of a vCPU's time.
fn work_for(share_bp: u64, read: Read) -> u64 {
    const READS: u64 = 16;
    const STEPS: u64 = 100_000;
    let reads = quickest(|| {
        for _ in 0..READS {
            black_box(read());
        }
    });
    let steps = quickest(|| compute(STEPS));
    let work_cycles = u128::from(reads) * u128::from(10_000 - share_bp) / u128::from(share_bp);
    (work_cycles * u128::from(STEPS) / u128::from(steps) / u128::from(READS)) as u64
}

/// Cycles of the quickest of 16 runs: what it takes when nothing else gets the CPU.
fn quickest(body: impl Fn()) -> u64 {
    let run = |_| {
        let start = clocks::tsc();
        body();
        clocks::tsc().wrapping_sub(start)
    };
    (0..16).map(run).min().unwrap_or(0).max(1)
}
