//! How often the guest left for us, why, and how long we took.
//!
//! One writer per vCPU and relaxed atomics: counting takes no lock, and a
//! snapshot may be taken at any time from another thread. Times run from the
//! return of KVM_RUN to the moment before the next one: our share of an exit,
//! not the switch itself.

use crate::histogram::{self, Histogram, Spread};
use serde::Serialize;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Version of the JSON that `--stats` writes.
pub const SCHEMA_VERSION: u32 = 1;

/// Distinct MSRs counted by number; the rest share one row.
const MSR_ROWS: usize = 64;

/// A count, and the time that it took.
#[derive(Debug, Default)]
pub struct Tally {
    count: AtomicU64,
    total_tsc: AtomicU64,
}

impl Tally {
    /// One more, which took this many TSC cycles.
    fn add(&self, cycles: u64) {
        // A single writer: load and store, with no locked instruction.
        let bump = |cell: &AtomicU64, by: u64| {
            cell.store(cell.load(Ordering::Relaxed).wrapping_add(by), Ordering::Relaxed);
        };
        bump(&self.count, 1);
        bump(&self.total_tsc, cycles);
    }

    fn snapshot(&self, tsc_hz: u64) -> Count {
        let cycles = u128::from(self.total_tsc.load(Ordering::Relaxed));
        Count {
            count: self.count.load(Ordering::Relaxed),
            total_ns: (cycles * 1_000_000_000 / u128::from(tsc_hz.max(1))) as u64,
        }
    }
}

/// A tally as JSON shows it.
#[derive(Debug, Default, Clone, Copy, Serialize, PartialEq, Eq)]
pub struct Count {
    /// How many.
    pub count: u64,
    /// Time spent answering them, in ns.
    pub total_ns: u64,
}

impl Count {
    fn add(&mut self, other: Count) {
        self.count += other.count;
        self.total_ns += other.total_ns;
    }
}

/// Reads and writes of one thing.
#[derive(Debug, Default)]
struct Pair {
    reads: Tally,
    writes: Tally,
}

/// What an exit was about, as far as statistics tell apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Subject {
    /// A port access and the range of the port bus that took it.
    Port(Access, Option<usize>),
    /// A memory-mapped access and the range of the MMIO bus that took it.
    Mmio(Access, Option<usize>),
    /// An MSR.
    Msr(Access, u32),
    /// HLT that KVM does not handle itself.
    Halt,
    /// A signal took the vCPU out of the guest.
    Interrupted,
    /// Anything else.
    Other,
}

/// Direction of an access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// The guest reads.
    Read,
    /// The guest writes.
    Write,
}

const REASONS: [&str; 9] = [
    "port_read",
    "port_write",
    "mmio_read",
    "mmio_write",
    "msr_read",
    "msr_write",
    "halt",
    "interrupted",
    "other",
];

impl Subject {
    fn reason(self) -> usize {
        let direction = |access| usize::from(access == Access::Write);
        match self {
            Subject::Port(access, _) => direction(access),
            Subject::Mmio(access, _) => 2 + direction(access),
            Subject::Msr(access, _) => 4 + direction(access),
            Subject::Halt => 6,
            Subject::Interrupted => 7,
            Subject::Other => 8,
        }
    }
}

/// The exits of one vCPU.
#[derive(Debug)]
pub struct VcpuStats {
    reasons: [Tally; REASONS.len()],
    durations: [Histogram; REASONS.len()],
    /// One row per bus range, and a last one for accesses that nobody claimed.
    ports: Vec<Pair>,
    mmio: Vec<Pair>,
    /// First come, first served; a key of 0 marks a free row.
    msr_keys: [AtomicU32; MSR_ROWS],
    msrs: Vec<Pair>,
}

impl VcpuStats {
    /// For buses with this many ranges.
    pub fn new(port_ranges: usize, mmio_ranges: usize) -> Self {
        let rows = |n| (0..n).map(|_| Pair::default()).collect();
        Self {
            reasons: Default::default(),
            durations: Default::default(),
            ports: rows(port_ranges + 1),
            mmio: rows(mmio_ranges + 1),
            msr_keys: [const { AtomicU32::new(0) }; MSR_ROWS],
            msrs: rows(MSR_ROWS + 1),
        }
    }

    /// Counts one exit.
    pub fn record(&self, subject: Subject, cycles: u64) {
        self.reasons[subject.reason()].add(cycles);
        self.durations[subject.reason()].record(cycles);
        let (access, row) = match subject {
            Subject::Port(access, range) => {
                (access, self.ports.get(range.unwrap_or(self.ports.len() - 1)))
            }
            Subject::Mmio(access, range) => {
                (access, self.mmio.get(range.unwrap_or(self.mmio.len() - 1)))
            }
            Subject::Msr(access, index) => (access, self.msrs.get(self.msr_row(index))),
            Subject::Halt | Subject::Interrupted | Subject::Other => return,
        };
        if let Some(row) = row {
            match access {
                Access::Read => row.reads.add(cycles),
                Access::Write => row.writes.add(cycles),
            }
        }
    }

    fn msr_row(&self, index: u32) -> usize {
        for (row, key) in self.msr_keys.iter().enumerate() {
            let found = key.load(Ordering::Relaxed);
            if found == index {
                return row;
            }
            if found == 0 {
                key.store(index, Ordering::Relaxed);
                return row;
            }
        }
        MSR_ROWS
    }

    /// Number of exits by reason so far.
    fn counts(&self) -> [u64; REASONS.len()] {
        std::array::from_fn(|i| self.reasons[i].count.load(Ordering::Relaxed))
    }
}

/// One row of the JSON: reads and writes of a thing that has a name.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// Device name, or the MSR's number in hexadecimal.
    pub name: String,
    /// Reads.
    pub reads: Count,
    /// Writes.
    pub writes: Count,
}

/// Exits of one reason as JSON shows them.
#[derive(Debug, Serialize)]
struct Reason {
    #[serde(flatten)]
    count: Count,
    #[serde(flatten)]
    spread: Spread,
}

/// Exits by reason, in a fixed order.
pub type Reasons = serde_json::Map<String, serde_json::Value>;

/// All that was counted, over all vCPUs.
#[derive(Debug, Serialize)]
pub struct Exits {
    /// Exits by reason.
    pub reasons: Reasons,
    /// MSR accesses that came to us, by number.
    pub msrs: Vec<Row>,
    /// Port accesses by device.
    pub ports: Vec<Row>,
    /// Memory-mapped accesses by device.
    pub mmio: Vec<Row>,
    /// Exits of each vCPU, by reason.
    pub vcpus: Vec<Reasons>,
}

/// Sums the exits of all vCPUs by reason: for marks.
pub fn totals<'a>(vcpus: impl IntoIterator<Item = &'a VcpuStats>) -> Reasons {
    let mut sums = [0u64; REASONS.len()];
    for vcpu in vcpus {
        sums.iter_mut().zip(vcpu.counts()).for_each(|(sum, n)| *sum += n);
    }
    REASONS.iter().zip(sums).map(|(name, n)| ((*name).into(), n.into())).collect()
}

/// Gathers what all vCPUs counted; `ports` and `mmio` name the bus ranges.
pub fn gather(
    vcpus: &[&VcpuStats],
    ports: impl Iterator<Item = &'static str>,
    mmio: impl Iterator<Item = &'static str>,
    tsc_hz: u64,
) -> Exits {
    let mut reasons = Reasons::new();
    for (i, name) in REASONS.iter().enumerate() {
        let mut sum = Count::default();
        vcpus.iter().for_each(|v| sum.add(v.reasons[i].snapshot(tsc_hz)));
        let spread = histogram::spread(vcpus.iter().map(|v| &v.durations[i]), tsc_hz);
        reasons.insert((*name).into(), serde_json::json!(Reason { count: sum, spread }));
    }
    let device_rows = |names: Vec<&str>, pick: fn(&VcpuStats) -> &[Pair]| {
        let mut rows = Vec::new();
        for (i, name) in names.into_iter().chain(["unclaimed"]).enumerate() {
            let mut row =
                Row { name: name.into(), reads: Count::default(), writes: Count::default() };
            for vcpu in vcpus {
                row.reads.add(pick(vcpu)[i].reads.snapshot(tsc_hz));
                row.writes.add(pick(vcpu)[i].writes.snapshot(tsc_hz));
            }
            rows.push(row);
        }
        rows.retain(|row| row.reads.count + row.writes.count > 0);
        rows
    };
    let mut msrs: std::collections::BTreeMap<u32, Row> = Default::default();
    for vcpu in vcpus {
        for (i, pair) in vcpu.msrs.iter().enumerate() {
            let key = vcpu.msr_keys.get(i).map_or(u32::MAX, |k| k.load(Ordering::Relaxed));
            let (reads, writes) = (pair.reads.snapshot(tsc_hz), pair.writes.snapshot(tsc_hz));
            if reads.count + writes.count == 0 {
                continue;
            }
            let row = msrs.entry(key).or_insert_with(|| Row {
                name: if i < MSR_ROWS { format!("{key:#x}") } else { "other".into() },
                reads: Count::default(),
                writes: Count::default(),
            });
            row.reads.add(reads);
            row.writes.add(writes);
        }
    }
    Exits {
        reasons,
        msrs: msrs.into_values().collect(),
        ports: device_rows(ports.collect(), |v| &v.ports),
        mmio: device_rows(mmio.collect(), |v| &v.mmio),
        vcpus: vcpus.iter().map(|v| totals([*v])).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exits_are_counted_where_they_belong() {
        let stats = [VcpuStats::new(1, 1), VcpuStats::new(1, 1)];
        stats[0].record(Subject::Msr(Access::Read, 0x4000_0020), 1000);
        stats[1].record(Subject::Msr(Access::Read, 0x4000_0020), 3000);
        stats[1].record(Subject::Msr(Access::Write, 0x4000_0021), 10);
        stats[0].record(Subject::Port(Access::Write, Some(0)), 10);
        stats[0].record(Subject::Port(Access::Read, None), 10);
        stats[0].record(Subject::Halt, 10);
        let all = gather(
            &[&stats[0], &stats[1]],
            ["serial"].into_iter(),
            ["hpet"].into_iter(),
            1_000_000_000,
        );
        assert_eq!(all.msrs.len(), 2);
        assert_eq!(all.msrs[0].name, "0x40000020");
        assert_eq!(all.msrs[0].reads, Count { count: 2, total_ns: 4000 });
        assert_eq!(
            all.ports.iter().map(|r| r.name.as_str()).collect::<Vec<_>>(),
            ["serial", "unclaimed"]
        );
        assert!(all.mmio.is_empty());
        assert_eq!(all.reasons["halt"]["count"], 1);
        assert_eq!(all.vcpus[1]["msr_read"], 1);
    }

    #[test]
    fn a_guest_that_touches_every_msr_costs_no_memory() {
        let stats = VcpuStats::new(0, 0);
        for index in 1..10_000 {
            stats.record(Subject::Msr(Access::Read, index), 1);
        }
        let all = gather(&[&stats], std::iter::empty(), std::iter::empty(), 1);
        assert_eq!(all.msrs.len(), MSR_ROWS + 1);
        let total: u64 = all.msrs.iter().map(|row| row.reads.count).sum();
        assert_eq!(total, 9_999);
    }
}
