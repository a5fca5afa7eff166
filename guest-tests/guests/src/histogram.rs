//! A log-linear histogram: eight buckets to the octave, so a bucket is at most 12.5 % wide.

/// Buckets for values up to 2^40.
const BUCKETS: usize = 8 * 38 + 8;
const LINEAR: u64 = 16;

/// Counts of values in their own unit.
#[derive(Debug)]
pub struct Histogram {
    counts: [u64; BUCKETS],
    total: u64,
    max: u64,
}

impl Histogram {
    /// An empty one.
    pub const fn new() -> Self {
        Self { counts: [0; BUCKETS], total: 0, max: 0 }
    }

    /// Counts one value.
    #[inline]
    pub fn record(&mut self, value: u64) {
        self.counts[bucket(value)] += 1;
        self.total += 1;
        self.max = self.max.max(value);
    }

    /// Adds another one's counts.
    pub fn merge(&mut self, other: &Self) {
        for (count, more) in self.counts.iter_mut().zip(other.counts) {
            *count += more;
        }
        self.total += other.total;
        self.max = self.max.max(other.max);
    }

    /// How many values were counted.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// The largest value.
    pub fn max(&self) -> u64 {
        self.max
    }

    /// A value that at least `per_mille` of 1000 values do not exceed: the upper end of their
    /// bucket, and never more than the largest value.
    pub fn quantile(&self, per_mille: u64) -> u64 {
        let rank = (self.total * per_mille).div_ceil(1000).max(1);
        let mut below = 0;
        for (index, count) in self.counts.iter().enumerate() {
            below += count;
            if below >= rank {
                return (start(index + 1) - 1).min(self.max);
            }
        }
        self.max
    }

    /// The buckets that hold something: the smallest value of each, and its count.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64)> {
        let filled = self.counts.iter().enumerate().filter(|(_, count)| **count > 0);
        filled.map(|(index, count)| (start(index), *count))
    }
}

impl Default for Histogram {
    fn default() -> Self {
        Self::new()
    }
}

/// Values below 16 have a bucket each; above, the top four bits choose it.
fn bucket(value: u64) -> usize {
    if value < LINEAR {
        return value as usize;
    }
    let shift = u64::from(value.ilog2()) - 3;
    ((shift * 8 + (value >> shift)) as usize).min(BUCKETS - 1)
}

/// The smallest value of a bucket.
fn start(index: usize) -> u64 {
    let index = index as u64;
    if index < LINEAR {
        return index;
    }
    let shift = index / 8 - 1;
    (8 + index % 8) << shift
}
