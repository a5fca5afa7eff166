//! Sleeps, and what every clock says about their length.

use crate::marks::mark;
use crate::report::Result as Report;
use crate::{clocksource, jobs, system, tsc};
use std::io;

const CLOCKS: [(&str, libc::clockid_t); 4] = [
    ("realtime_ns", libc::CLOCK_REALTIME),
    ("monotonic_ns", libc::CLOCK_MONOTONIC),
    ("monotonic_raw_ns", libc::CLOCK_MONOTONIC_RAW),
    ("boottime_ns", libc::CLOCK_BOOTTIME),
];

/// `sleep-test:N:MS[:MARK]`: sleeps N times MS, each until a point in time fixed at
/// the start, so that wake-up latency does not add up and a lost or early timer
/// shows. Marks MARK before the first sleep and the next number after the last, so
/// that the host's clock tells their length, too.
///
/// # Errors
/// Arguments that are not numbers; a failing system call.
pub fn run(arguments: &[String]) -> Result<(), String> {
    let n = jobs::number(arguments, 0, 1000)?;
    let ms = jobs::number(arguments, 1, 1)?;
    let first_mark = match arguments.get(2) {
        Some(_) => u8::try_from(jobs::number(arguments, 2, 0)?).ok().filter(|mark| *mark < u8::MAX),
        None => None,
    };
    let interval_ns = ms.saturating_mul(1_000_000);
    let tsc_hz = tsc::measure_hz();

    let clocks_before = CLOCKS.map(|(_, clock)| system::clock_ns(clock));
    let tsc_before = tsc::ordered();
    first_mark.into_iter().for_each(mark);
    let start_ns = system::clock_ns(libc::CLOCK_MONOTONIC);
    let mut early = 0;
    let mut late_ns = Vec::with_capacity(usize::try_from(n.min(1 << 20)).unwrap_or(0));
    for i in 1..=n {
        let due_ns = start_ns.saturating_add(interval_ns.saturating_mul(i));
        sleep_until(due_ns)?;
        let now_ns = system::clock_ns(libc::CLOCK_MONOTONIC);
        early += u64::from(now_ns < due_ns);
        late_ns.push(now_ns.saturating_sub(due_ns));
    }
    first_mark.into_iter().for_each(|first| mark(first + 1));
    let tsc_cycles = tsc::ordered().wrapping_sub(tsc_before);
    let clocks_after = CLOCKS.map(|(_, clock)| system::clock_ns(clock));
    late_ns.sort_unstable();

    let mut report = Report::of("sleep-test")
        .text("clock", &clocksource::current()?)
        .count("n", n)
        .count("ms", ms)
        .count("early", early)
        .count("late_ns_p50", late_ns.get(late_ns.len() / 2).copied().unwrap_or(0))
        .count("late_ns_max", late_ns.last().copied().unwrap_or(0))
        .real("tsc_ns", tsc_cycles as f64 / tsc_hz * 1e9);
    for (((name, _), before), after) in CLOCKS.iter().zip(clocks_before).zip(clocks_after) {
        report = report.count(name, after.wrapping_sub(before));
    }
    report.print();
    Ok(())
}

fn sleep_until(due_ns: u64) -> Result<(), String> {
    let due = libc::timespec {
        tv_sec: (due_ns / 1_000_000_000) as libc::time_t,
        tv_nsec: (due_ns % 1_000_000_000) as libc::c_long,
    };
    // SAFETY: `due` is a valid timespec; TIMER_ABSTIME writes no remainder.
    let error = unsafe {
        libc::clock_nanosleep(
            libc::CLOCK_MONOTONIC,
            libc::TIMER_ABSTIME,
            &raw const due,
            std::ptr::null_mut(),
        )
    };
    match error {
        0 => Ok(()),
        error => Err(format!("clock_nanosleep: {}", io::Error::from_raw_os_error(error))),
    }
}
