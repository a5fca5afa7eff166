//! How durations are spread, counted without a lock and in little memory.
//!
//! Buckets are log-linear: 16 to an octave, so that a value read back is at most
//! 1/32 (3 %) off. They cover 2⁷ to 2³⁴ TSC cycles, which is from a few dozen ns to
//! several seconds; what lies outside counts in the first or last bucket. Minimum
//! and maximum are exact.

use hdrhistogram::Histogram as Hdr;
use serde::Serialize;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

const SUB_BITS: u32 = 4;
const FIRST_OCTAVE: u32 = 7;
const LAST_OCTAVE: u32 = 33;
const BUCKETS: usize = ((LAST_OCTAVE - FIRST_OCTAVE + 1) as usize) << SUB_BITS;

/// Durations in TSC cycles. One thread records; any may take a snapshot.
#[derive(Debug)]
pub struct Histogram {
    min: AtomicU64,
    max: AtomicU64,
    buckets: [AtomicU32; BUCKETS],
}

/// The bucket of a duration.
fn bucket(cycles: u64) -> usize {
    let octave = (63 - (cycles | 1).leading_zeros()).clamp(FIRST_OCTAVE, LAST_OCTAVE);
    let in_octave = cycles >> (octave - SUB_BITS);
    // Below the first octave this is 0 to 15, above the last one it is large.
    let sub = in_octave.saturating_sub(1 << SUB_BITS).min((1 << SUB_BITS) - 1);
    (((octave - FIRST_OCTAVE) as usize) << SUB_BITS) + sub as usize
}

/// The middle of a bucket, in cycles.
fn middle(bucket: usize) -> u64 {
    let octave = FIRST_OCTAVE + (bucket >> SUB_BITS) as u32;
    let sub = (bucket & ((1 << SUB_BITS) - 1)) as u64;
    let width = 1 << (octave - SUB_BITS);
    (((1 << SUB_BITS) + sub) * width) + width / 2
}

impl Default for Histogram {
    fn default() -> Self {
        Self {
            min: AtomicU64::new(u64::MAX),
            max: AtomicU64::new(0),
            buckets: [const { AtomicU32::new(0) }; BUCKETS],
        }
    }
}

impl Histogram {
    /// Counts one duration. A single writer: no locked instruction.
    pub fn record(&self, cycles: u64) {
        if cycles < self.min.load(Ordering::Relaxed) {
            self.min.store(cycles, Ordering::Relaxed);
        }
        if cycles > self.max.load(Ordering::Relaxed) {
            self.max.store(cycles, Ordering::Relaxed);
        }
        let cell = &self.buckets[bucket(cycles)];
        let mut count = cell.load(Ordering::Relaxed);
        if count == u32::MAX {
            // After four thousand million of a kind: halving keeps the proportions.
            for cell in &self.buckets {
                cell.store(cell.load(Ordering::Relaxed) / 2, Ordering::Relaxed);
            }
            count /= 2;
        }
        cell.store(count + 1, Ordering::Relaxed);
    }
}

/// Where the durations of one kind of exit lie, in ns.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Spread {
    /// The shortest.
    pub min_ns: u64,
    /// The median, to 3 %.
    pub p50_ns: u64,
    /// The 99th percentile, to 3 %.
    pub p99_ns: u64,
    /// The longest.
    pub max_ns: u64,
}

/// Reduces the histograms of several vCPUs to one spread.
pub fn spread<'a>(parts: impl Iterator<Item = &'a Histogram>, tsc_hz: u64) -> Spread {
    const LARGEST: u64 = 1 << (LAST_OCTAVE + 1);
    // Two digits: finer than the buckets are. The bounds are constants, so this
    // cannot fail.
    let Ok(mut all) = Hdr::<u64>::new_with_bounds(1, LARGEST, 2) else { return Spread::default() };
    let (mut min, mut max) = (u64::MAX, 0);
    for part in parts {
        min = min.min(part.min.load(Ordering::Relaxed));
        max = max.max(part.max.load(Ordering::Relaxed));
        for (i, cell) in part.buckets.iter().enumerate() {
            all.saturating_record_n(middle(i), cell.load(Ordering::Relaxed).into());
        }
    }
    if all.is_empty() {
        return Spread::default();
    }
    let ns = |cycles: u64| {
        (u128::from(cycles) * 1_000_000_000 / u128::from(tsc_hz.max(1))).min(u64::MAX.into()) as u64
    };
    // A bucket's middle may lie outside of what was seen.
    let at = |quantile| ns(all.value_at_quantile(quantile).clamp(min.min(max), max));
    Spread { min_ns: ns(min), p50_ns: at(0.5), p99_ns: at(0.99), max_ns: ns(max) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GHZ: u64 = 1_000_000_000;

    proptest! {
        #[test]
        fn a_bucket_is_near_what_it_holds(cycles in 1_u64 << FIRST_OCTAVE..1 << (LAST_OCTAVE + 1)) {
            let middle = middle(bucket(cycles));
            prop_assert!(middle.abs_diff(cycles) <= cycles / 32 + 1, "{cycles} {middle}");
        }

        #[test]
        fn any_duration_has_a_bucket(cycles: u64) {
            prop_assert!(bucket(cycles) < BUCKETS);
        }

        #[test]
        fn buckets_keep_the_order(a: u64, b: u64) {
            prop_assert!(a > b || bucket(a) <= bucket(b));
        }
    }

    #[test]
    fn the_spread_of_all_vcpus() {
        let parts = [Histogram::default(), Histogram::default()];
        assert_eq!(spread(parts.iter(), GHZ), Spread::default());
        for i in 1..=990 {
            parts[i % 2].record(10_000 + i as u64);
        }
        for _ in 0..10 {
            parts[0].record(1_000_000);
        }
        let s = spread(parts.iter(), GHZ);
        assert_eq!((s.min_ns, s.max_ns), (10_001, 1_000_000));
        assert!(s.p50_ns.abs_diff(10_500) < 500 && s.p99_ns.abs_diff(10_990) < 500, "{s:?}");
    }

    #[test]
    fn one_value_is_all_four() {
        let one = Histogram::default();
        one.record(70);
        let s = Spread { min_ns: 70, p50_ns: 70, p99_ns: 70, max_ns: 70 };
        assert_eq!(spread([one].iter(), GHZ), s);
    }

    #[test]
    fn a_full_bucket_halves_all() {
        let full = Histogram::default();
        full.buckets[bucket(1000)].store(u32::MAX, Ordering::Relaxed);
        full.buckets[bucket(5000)].store(200, Ordering::Relaxed);
        full.record(1000);
        assert_eq!(full.buckets[bucket(1000)].load(Ordering::Relaxed), u32::MAX / 2 + 1);
        assert_eq!(full.buckets[bucket(5000)].load(Ordering::Relaxed), 100);
    }

    #[test]
    fn it_stays_small() {
        // Nine reasons to exit: within 16 KiB a vCPU.
        assert!(9 * size_of::<Histogram>() <= 16 << 10, "{}", size_of::<Histogram>());
    }
}
