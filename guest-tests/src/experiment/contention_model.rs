//! A discrete-event model of many vCPUs that read one clock: what the curve could
//! look like beyond the CPUs that are here. Its parameters are measured; what it
//! says is no measurement.
//!
//! A vCPU computes for a fixed time, then reads. A read has a part that runs beside
//! all others, whose length varies as the measured p50 and p99 say, and a part for
//! which vCPUs queue, first come, first served. Nothing else is shared: neither the
//! memory bus nor the host's kernel.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// One machine, times in ns.
#[derive(Debug, Clone, Copy)]
pub struct Load {
    /// vCPUs.
    pub cpus: u32,
    /// Computation before each read.
    pub work_ns: f64,
    /// A read by a vCPU alone, on average.
    pub read_ns: f64,
    /// Its 99th percentile over its median, at least 1.
    pub read_spread: f64,
    /// The part of it in which a vCPU is alone.
    pub serial_ns: f64,
    /// What each other vCPU adds to a read.
    pub per_other_ns: f64,
}

/// Reads simulated, of all vCPUs or of each, whichever is more.
const READS: u64 = 40_000;
const READS_PER_CPU: u64 = 400;

impl Load {
    /// Reads per second of all vCPUs together. The same load gives the same result.
    #[must_use]
    pub fn reads_per_s(&self) -> f64 {
        let mut random = Random(0x9E37_79B9_7F4A_7C15);
        let others = f64::from(self.cpus.saturating_sub(1)) * self.per_other_ns;
        let mut arrival = |now: f64| {
            let free = (self.one_read_ns(&mut random) - self.serial_ns).max(0.0) + others;
            Reverse(Time(now + self.work_ns + free))
        };
        // The heap holds when each vCPU will want its turn.
        let mut arrivals: BinaryHeap<_> = (0..self.cpus).map(|_| arrival(0.0)).collect();
        let total = READS.max(READS_PER_CPU * u64::from(self.cpus));
        let (mut turn_free, mut last) = (0.0_f64, 0.0_f64);
        for _ in 0..total {
            let Some(Reverse(Time(now))) = arrivals.pop() else { return 0.0 };
            last = turn_free.max(now) + self.serial_ns;
            turn_free = if self.serial_ns > 0.0 { last } else { 0.0 };
            arrivals.push(arrival(last));
        }
        total as f64 * 1e9 / last.max(f64::MIN_POSITIVE)
    }

    /// One read's length: log-normal with that mean and that spread.
    fn one_read_ns(&self, random: &mut Random) -> f64 {
        const Z_P99: f64 = 2.326_347_9;
        let sigma = self.read_spread.max(1.0).ln() / Z_P99;
        self.read_ns * (sigma * random.normal() - sigma * sigma / 2.0).exp()
    }
}

/// A moment; totally ordered, since none is NaN.
#[derive(PartialEq)]
struct Time(f64);

impl Eq for Time {}

impl Ord for Time {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl PartialOrd for Time {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

/// SplitMix64 (Steele et al., 2014): every run draws the same numbers.
struct Random(u64);

impl Random {
    /// Uniform in (0, 1].
    fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 / (1_u64 << 53) as f64 + f64::EPSILON
    }

    /// Standard normal (Box and Muller, 1958).
    fn normal(&mut self) -> f64 {
        (-2.0 * self.uniform().ln()).sqrt() * (std::f64::consts::TAU * self.uniform()).cos()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(cpus: u32) -> Load {
        Load {
            cpus,
            work_ns: 0.0,
            read_ns: 1000.0,
            read_spread: 1.0,
            serial_ns: 0.0,
            per_other_ns: 0.0,
        }
    }

    fn near(value: f64, expected: f64) {
        assert!((value / expected - 1.0).abs() < 0.02, "{value} is not {expected}");
    }

    #[test]
    fn nothing_shared_scales_and_a_lock_is_a_ceiling() {
        near(load(1).reads_per_s(), 1e6);
        near(load(240).reads_per_s(), 240e6);
        let locked = |cpus| Load { serial_ns: 100.0, ..load(cpus) };
        near(locked(1).reads_per_s(), 1e6);
        near(locked(240).reads_per_s(), 1e7);
        near(Load { work_ns: 9000.0, ..locked(10) }.reads_per_s(), 1e6);
    }

    #[test]
    fn every_other_vcpu_costs_what_it_is_told_to() {
        near(Load { per_other_ns: 10.0, ..load(101) }.reads_per_s(), 101.0 / 2e-6);
    }

    #[test]
    fn a_queue_with_random_service_is_between_its_bounds() {
        // Half of the time in the lock: two vCPUs wait for each other sometimes.
        let random = Load { read_spread: 3.0, serial_ns: 500.0, ..load(2) };
        let rate = random.reads_per_s();
        let alone = Load { cpus: 1, ..random }.reads_per_s();
        assert!(rate < 2.0 * alone && rate > 1.2 * alone, "{rate} {alone}");
    }
}
