//! The host's time-stamp counter, alone and beside the clock it is judged by.

use std::time::{Duration, Instant};

/// Reads the host's TSC, after everything before it in program order and before
/// everything after it.
pub fn read_ordered() -> u64 {
    // SAFETY: LFENCE and RDTSC exist on every x86-64 processor, touch no memory
    // and fault only where CR4.TSD is set, which Linux does not do.
    unsafe {
        core::arch::x86_64::_mm_lfence();
        let tsc = core::arch::x86_64::_rdtsc();
        core::arch::x86_64::_mm_lfence();
        tsc
    }
}

/// Reads the host's TSC without ordering it: for durations long beside a
/// reorder window.
pub fn read() -> u64 {
    // SAFETY: as in `read_ordered`.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// The TSC and CLOCK_MONOTONIC_RAW at the same moment.
#[derive(Debug, Clone, Copy)]
pub struct Bracket {
    /// Host TSC, in the middle of the two readings around the clock's.
    pub tsc: u64,
    /// CLOCK_MONOTONIC_RAW in ns.
    pub raw_ns: u64,
    /// Cycles from the first reading to the last: both moments lie within.
    pub width: u64,
}

impl Bracket {
    /// One reading: TSC, clock, TSC.
    pub fn read() -> Self {
        let before = read_ordered();
        let raw_ns = monotonic_raw_ns();
        let width = read_ordered().wrapping_sub(before);
        Self { tsc: before.wrapping_add(width / 2), raw_ns, width }
    }

    /// The tightest of a number of readings: an interruption widens a bracket.
    pub fn tightest() -> Self {
        let others = (1..64).map(|_| Self::read());
        others.fold(Self::read(), |best, next| if next.width < best.width { next } else { best })
    }
}

/// The TSC's frequency, measured against CLOCK_MONOTONIC_RAW.
#[derive(Debug, Clone, Copy)]
pub struct Rate {
    /// In Hz.
    pub hz: f64,
    /// How far off the measurement may be, in ppm: width of the two brackets over the span.
    pub uncertainty_ppm: f64,
}

impl Rate {
    /// Measures for `span`.
    pub fn measure(span: Duration) -> Self {
        let first = Bracket::tightest();
        let start = Instant::now();
        while start.elapsed() < span {
            std::thread::sleep(span.saturating_sub(start.elapsed()));
        }
        let second = Bracket::tightest();
        let ns = second.raw_ns.saturating_sub(first.raw_ns).max(1) as f64;
        let cycles = second.tsc.wrapping_sub(first.tsc) as f64;
        let width = (first.width + second.width) as f64 / 2.0;
        Self { hz: cycles / ns * 1e9, uncertainty_ppm: width / cycles * 1e6 }
    }
}

/// CLOCK_MONOTONIC_RAW in ns.
pub fn monotonic_raw_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid place for the result; the clock exists on every
    // Linux, so the call cannot fail.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_RAW, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
