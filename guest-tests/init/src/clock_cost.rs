//! What one clock read costs a user program, for every clocksource there is:
//! rdtsc, COUNT × clock_gettime(CLOCK_REALTIME), rdtsc, divide.

use crate::marks::mark;
use crate::report::Result as Report;
use crate::{clocksource, jobs, system, tsc};

const MAX_COUNT: u64 = 1000;
const MAX_BATCHES: usize = 1000;
const MIN_BATCHES: usize = 8;

/// `clock-cost[:BUDGET_MS]`: measures each clocksource for about BUDGET_MS
/// (default 500) and returns to the one in use before.
///
/// # Errors
/// No clocksource could be read or switched to.
pub fn run(arguments: &[String]) -> Result<(), String> {
    let budget_ms = jobs::number(arguments, 0, 500)?;
    // On a thread of its own: the jobs that follow must not stay pinned.
    std::thread::spawn(move || measure_all(budget_ms))
        .join()
        .unwrap_or_else(|_| Err("thread panicked".into()))
}

fn measure_all(budget_ms: u64) -> Result<(), String> {
    if let Some(&cpu) = system::cpus().first() {
        system::pin(cpu)?;
    }
    let original = clocksource::current()?;
    // The ruler is measured before any slow clock is in use.
    let tsc_hz = tsc::measure_hz();
    Report::of("tsc")
        .real("hz", tsc_hz)
        .real("kernel_hz", tsc::kernel_hz().unwrap_or(f64::NAN))
        .text("against", &original)
        .print();
    let budget_cycles = (tsc_hz * budget_ms as f64 / 1e3) as u64;

    let mut outcome = Ok(());
    for (index, name) in (0..).zip(clocksource::available()?) {
        match clocksource::switch(&name) {
            Ok(()) => measure(&name, 2 * index, budget_cycles, tsc_hz),
            Err(failure) => outcome = Err(failure),
        }
    }
    clocksource::switch(&original).and(outcome)
}

/// Marks `first_mark` before the first read and the next number after the last, so
/// that the host can count what the reads cost it.
fn measure(name: &str, first_mark: u8, budget_cycles: u64, tsc_hz: f64) {
    mark(first_mark);
    let start = tsc::ordered();
    let elapsed = || tsc::ordered().wrapping_sub(start);
    let mut reads = 0;
    let mut batch = |count: u64| {
        reads += count;
        batch_cycles(count)
    };

    // A batch must outweigh the two TSC reads around it, and there must be many
    // batches even where every read is an exit to an emulated user space.
    let mut count = 1;
    while count < MAX_COUNT && batch(count) < budget_cycles / 256 {
        count = (count * 2).min(MAX_COUNT);
    }
    let mut per_read = Vec::with_capacity(MAX_BATCHES);
    while per_read.len() < MIN_BATCHES
        || (per_read.len() < MAX_BATCHES && elapsed() < budget_cycles)
    {
        per_read.push(batch(count) as f64 / count as f64);
    }
    mark(first_mark + 1);
    per_read.sort_by(f64::total_cmp);
    let p50 = per_read[per_read.len() / 2];

    Report::of("clock-cost")
        .text("clock", name)
        .text("where", "guest-user")
        .real("cycles_p50", p50)
        .real("cycles_min", per_read[0])
        .real("cycles_max", per_read[per_read.len() - 1])
        .real("ns_p50", p50 / tsc_hz * 1e9)
        .real("ns_min", per_read[0] / tsc_hz * 1e9)
        .real("ns_max", per_read[per_read.len() - 1] / tsc_hz * 1e9)
        .count("samples", per_read.len() as u64)
        .count("count", count)
        .count("reads", reads)
        .count("first_mark", first_mark.into())
        .print();
}

fn batch_cycles(count: u64) -> u64 {
    let start = tsc::ordered();
    for _ in 0..count {
        std::hint::black_box(system::clock_ns(libc::CLOCK_REALTIME));
    }
    tsc::ordered().wrapping_sub(start)
}
