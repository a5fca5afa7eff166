//! Order statistics without allocation.

use core::fmt;

/// Cycles of equal batches of reads, at most `N` of them.
#[derive(Debug)]
pub struct Batches<const N: usize> {
    cycles: [u64; N],
    count: usize,
    reads_per_batch: u64,
}

impl<const N: usize> Batches<N> {
    /// Runs `batch` up to `count` times (at most `N`). It returns the cycles that its
    /// `reads_per_batch` reads took.
    pub fn run(count: u64, reads_per_batch: u64, mut batch: impl FnMut(u64) -> u64) -> Self {
        let count = (count as usize).clamp(1, N);
        let mut batches = Self { cycles: [0; N], count, reads_per_batch };
        // The first one warms caches and translations and is thrown away.
        batch(reads_per_batch);
        for cycles in &mut batches.cycles[..count] {
            *cycles = batch(reads_per_batch);
        }
        batches.cycles[..count].sort_unstable();
        batches
    }

    /// Number of batches.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Cycles per read in the median batch.
    pub fn p50(&self) -> PerRead {
        self.per_read(self.count / 2)
    }

    /// Cycles per read in the fastest batch.
    pub fn min(&self) -> PerRead {
        self.per_read(0)
    }

    /// Cycles per read in the slowest batch.
    pub fn max(&self) -> PerRead {
        self.per_read(self.count - 1)
    }

    fn per_read(&self, rank: usize) -> PerRead {
        PerRead { total: self.cycles[rank], reads: self.reads_per_batch }
    }
}

/// A quotient, printed with two decimals: guests have no use for floats.
#[derive(Debug, Clone, Copy)]
pub struct PerRead {
    /// Dividend, in whatever unit is printed.
    pub total: u64,
    /// Divisor, at least 1.
    pub reads: u64,
}

impl PerRead {
    /// The same quotient in nanoseconds, at `hz` cycles per second.
    pub fn to_ns(self, hz: u64) -> Self {
        let ns = u128::from(self.total) * 1_000_000_000 / u128::from(hz.max(1));
        Self { total: u64::try_from(ns).unwrap_or(u64::MAX), ..self }
    }
}

impl fmt::Display for PerRead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hundredths = u128::from(self.total) * 100 / u128::from(self.reads.max(1));
        write!(f, "{}.{:02}", hundredths / 100, hundredths % 100)
    }
}
