//! The file that `--stats` writes.

use crate::ending::Ending;
use crate::error::{Error, Result};
use crate::host::HostKind;
use crate::housekeeping::Tally;
use crate::hpet;
use crate::machine::Shared;
use crate::marks::Mark;
use crate::stats::{self, Exits};
use serde::Serialize;
use std::fs::File;
use std::path::Path;

/// What `--stats` writes.
#[derive(Debug, Serialize)]
struct Report {
    schema_version: u32,
    version: &'static str,
    host_kind: HostKind,
    method: &'static str,
    ending: String,
    exit_code: i32,
    vcpus: usize,
    tsc_hz: u64,
    marks: Vec<Mark>,
    exits: Exits,
    #[serde(skip_serializing_if = "Option::is_none")]
    hpet: Option<hpet::Report>,
    housekeeping: Vec<Tally>,
}

const METHOD: &str =
    "TSC from the return of KVM_RUN to the moment before the next KVM_RUN, per exit";

/// Writes the file when the machine has ended.
///
/// # Errors
/// One line that names the file.
pub fn write(path: &Path, shared: &Shared, ending: &Ending) -> Result<()> {
    let peripherals = &shared.peripherals;
    let tsc_hz = shared.timeline.nominal_hz();
    let vcpus: Vec<_> = shared.stats.iter().collect();
    let report = Report {
        schema_version: stats::SCHEMA_VERSION,
        version: env!("CARGO_PKG_VERSION"),
        host_kind: HostKind::detect(),
        method: METHOD,
        ending: ending.to_string(),
        exit_code: ending.code(),
        vcpus: vcpus.len(),
        tsc_hz,
        marks: shared.marks.list(),
        exits: stats::gather(&vcpus, peripherals.ports.names(), peripherals.mmio.names(), tsc_hz),
        hpet: shared.hpet.as_ref().map(hpet::Meters::report),
        housekeeping: shared.housekeeping.tallies(),
    };
    let failed = |e: &dyn std::fmt::Display| Error::new(format!("--stats {}: {e}", path.display()));
    let file = File::create(path).map_err(|e| failed(&e))?;
    serde_json::to_writer_pretty(file, &report).map_err(|e| failed(&e))
}
