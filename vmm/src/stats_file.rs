//! The file that `--stats` writes.

use crate::ending::Ending;
use crate::error::{Error, Result};
use crate::host::HostKind;
use crate::housekeeping::Tally;
use crate::hpet;
use crate::machine::Shared;
use crate::marks::Mark;
use crate::output_file;
use crate::stats::{self, Exits};
use serde::Serialize;
use std::fs::File;
use std::path::{Path, PathBuf};

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

/// The file, opened before the start: what cannot be written is better known then,
/// and a run cut short by a crash leaves an empty file rather than an old one.
#[derive(Debug)]
pub struct StatsFile {
    path: PathBuf,
    file: File,
    host_kind: HostKind,
}

impl StatsFile {
    /// Makes the file.
    ///
    /// # Errors
    /// One line that names it.
    pub fn open(path: &Path) -> Result<Self> {
        let file = output_file::create(path).map_err(|e| failed(path, &e))?;
        Ok(Self { path: path.to_owned(), file, host_kind: HostKind::detect() })
    }

    /// Writes it when the machine has ended.
    ///
    /// # Errors
    /// One line that names it.
    pub fn write(&self, shared: &Shared, ending: &Ending) -> Result<()> {
        let Shared { peripherals, stats, timeline, marks, hpet, .. } = shared;
        let tsc_hz = timeline.nominal_hz();
        let vcpus: Vec<_> = stats.iter().collect();
        let (ports, mmio) = (peripherals.ports.names(), peripherals.mmio.names());
        let report = Report {
            schema_version: stats::SCHEMA_VERSION,
            version: env!("CARGO_PKG_VERSION"),
            host_kind: self.host_kind,
            method: METHOD,
            ending: ending.to_string(),
            exit_code: ending.code(),
            vcpus: vcpus.len(),
            tsc_hz,
            marks: marks.list(),
            exits: stats::gather(&vcpus, ports, mmio, tsc_hz),
            hpet: hpet.as_ref().map(hpet::Meters::report),
            housekeeping: shared.housekeeping.tallies(),
        };
        serde_json::to_writer_pretty(&self.file, &report)
            .map_err(|e| failed(&self.path, &format!("{e}, after this run: {ending}")))
    }
}

fn failed(path: &Path, e: &dyn std::fmt::Display) -> Error {
    Error::new(format!("--stats {}: {e}", path.display()))
}
