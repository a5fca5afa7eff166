//! The TSC, the ruler that every clock is measured with.

use crate::{dmesg, system};
use core::arch::x86_64::{_mm_lfence, _rdtsc};
use std::time::Duration;

/// Reads the TSC after every earlier instruction has finished and before any
/// later one starts (SDM vol. 2, RDTSC).
#[inline]
pub fn ordered() -> u64 {
    // SAFETY: LFENCE and RDTSC are there on every x86-64 CPU, and Linux leaves
    // RDTSC open to user programs.
    unsafe {
        _mm_lfence();
        let value = _rdtsc();
        _mm_lfence();
        value
    }
}

/// The TSC's frequency in Hz against CLOCK_MONOTONIC_RAW, over 200 ms.
///
/// MONOTONIC_RAW is what the current clocksource says, untouched by NTP.
pub fn measure_hz() -> f64 {
    let start = simultaneous();
    std::thread::sleep(Duration::from_millis(200));
    let end = simultaneous();
    (end.0 - start.0) * 1e9 / (end.1 - start.1)
}

/// The frequency that the kernel found at boot, in Hz, if its log still says.
pub fn kernel_hz() -> Option<f64> {
    let records = dmesg::records().ok()?;
    let line = records.iter().find(|r| r.text.starts_with("tsc: Detected "))?;
    let mhz: f64 = line.text.split_whitespace().nth(2)?.parse().ok()?;
    Some(mhz * 1e6)
}

/// TSC and CLOCK_MONOTONIC_RAW at one instant: the tightest of a few attempts.
fn simultaneous() -> (f64, f64) {
    (0..16)
        .map(|_| {
            let before = ordered();
            let ns = system::clock_ns(libc::CLOCK_MONOTONIC_RAW);
            let width = ordered().wrapping_sub(before);
            (width, before as f64 + width as f64 / 2.0, ns as f64)
        })
        .min_by_key(|attempt| attempt.0)
        .map_or((0.0, 0.0), |(_, tsc, ns)| (tsc, ns))
}
