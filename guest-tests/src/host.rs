//! What a measurement ran on: every report carries it.

use serde::Serialize;
use vmm::host::{HostKind, cpu_model};

/// The host, as it stands in reports.
#[derive(Debug, Clone, Serialize)]
pub struct Host {
    /// `hardware`, `software` or `nested`; `mixed` where rows differ.
    pub kind: String,
    /// Processor model.
    pub cpu: String,
    /// Online CPUs.
    pub cpus: usize,
    /// Kernel release.
    pub kernel: String,
}

impl Host {
    /// This machine.
    #[must_use]
    pub fn here() -> Self {
        let read = |path| std::fs::read_to_string(path).unwrap_or_default();
        Self {
            kind: label(Kind::Direct(HostKind::detect())).into(),
            cpu: cpu_model(&read("/proc/cpuinfo")).to_owned(),
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
        }
    }
}

/// What a VM ran on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// This machine's own KVM.
    Direct(HostKind),
    /// KVM in the emulated machine of the lab.
    Lab,
}

/// The word for a kind in reports.
#[must_use]
pub fn label(kind: Kind) -> &'static str {
    match kind {
        Kind::Direct(HostKind::Hardware) => "hardware",
        Kind::Direct(HostKind::Software) => "software",
        Kind::Direct(HostKind::Nested) => "nested",
        Kind::Lab => "nested, emulated",
    }
}
