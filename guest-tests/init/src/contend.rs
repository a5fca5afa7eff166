//! Every CPU reads the clock at once: what contention costs, and whether time
//! ever goes back, on one CPU or between two.

use crate::report::Result as Report;
use crate::{clocksource, jobs, system, tsc};
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};

/// Reads between two looks at what other CPUs have seen: rare enough not to be
/// the contended resource itself.
const CROSS_CHECK_EVERY: u64 = 256;

struct Seen {
    reads: u64,
    elapsed_cycles: u64,
    backward: u64,
    backward_between_cpus: u64,
}

/// `contend:SECONDS[:CLOCKSOURCE]`
///
/// # Errors
/// The clocksource is not there; a CPU cannot be pinned to.
pub fn run(arguments: &[String]) -> Result<(), String> {
    let seconds = jobs::number(arguments, 0, 5)?;
    let original = clocksource::current()?;
    if let Some(name) = arguments.get(1) {
        clocksource::switch(name)?;
    }
    let cpus = system::cpus();
    let tsc_hz = tsc::measure_hz();
    let duration_cycles = (tsc_hz * seconds as f64) as u64;
    let latest_ns = AtomicU64::new(0);
    let start = Barrier::new(cpus.len());

    let seen: Vec<Result<Seen, String>> = std::thread::scope(|scope| {
        let threads: Vec<_> = cpus
            .iter()
            .map(|&cpu| {
                let (latest_ns, start) = (&latest_ns, &start);
                scope.spawn(move || {
                    // All arrive at the barrier, so that a failure stops nobody.
                    let pinned = system::pin(cpu);
                    start.wait();
                    pinned.map(|()| read_until(duration_cycles, latest_ns))
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap_or(Err("thread panicked".into()))).collect()
    });
    let seen: Vec<Seen> = seen.into_iter().collect::<Result<_, _>>()?;

    let rate = |s: &Seen| s.reads as f64 * tsc_hz / s.elapsed_cycles as f64;
    let rates: Vec<u64> = seen.iter().map(|s| rate(s) as u64).collect();
    Report::of("contend")
        .text("clock", &clocksource::current()?)
        .count("cpus", cpus.len() as u64)
        .real("seconds", duration_cycles as f64 / tsc_hz)
        .count("reads", seen.iter().map(|s| s.reads).sum())
        .count("reads_per_s", rates.iter().sum())
        .counts("reads_per_s_by_cpu", &rates)
        .count("backward", seen.iter().map(|s| s.backward).sum())
        .count("backward_between_cpus", seen.iter().map(|s| s.backward_between_cpus).sum())
        .print();
    clocksource::switch(&original)
}

fn read_until(duration_cycles: u64, latest_ns: &AtomicU64) -> Seen {
    let start = tsc::ordered();
    let mut seen = Seen { reads: 0, elapsed_cycles: 0, backward: 0, backward_between_cpus: 0 };
    let mut previous = 0;
    while seen.elapsed_cycles < duration_cycles {
        for _ in 0..CROSS_CHECK_EVERY {
            let now = system::clock_ns(libc::CLOCK_MONOTONIC);
            seen.backward += u64::from(now < previous);
            previous = now;
            // A slow clock must not overrun the time asked for.
            seen.reads += 1;
            if tsc::ordered().wrapping_sub(start) >= duration_cycles {
                break;
            }
        }
        // What another CPU read before this load must not be later than what is
        // read after it.
        let earlier = latest_ns.load(Ordering::SeqCst);
        let now = system::clock_ns(libc::CLOCK_MONOTONIC);
        seen.reads += 1;
        seen.backward_between_cpus += u64::from(now < earlier);
        latest_ns.fetch_max(now, Ordering::SeqCst);
        seen.elapsed_cycles = tsc::ordered().wrapping_sub(start);
    }
    seen
}
