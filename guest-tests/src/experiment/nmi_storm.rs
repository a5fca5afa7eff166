//! `clocklab nmi-storm`: page and counter read from an NMI handler, while the code
//! that it interrupts reads them too and the page is republished. The
//! document is the kernel's patch thread on a sched_clock that is safe from NMI, 2015.

use super::{Common, driven};
use crate::control::{Begin, Driven};
use crate::host::label;
use crate::report::{Report, figure};
use crate::results::{self, Result as Line};
use crate::vm::VmError;
use serde::Serialize;
use serde_json::json;
use std::time::Duration;
use vmm::control::Command;

/// What to run.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// Length of the storm
    #[arg(long, value_name = "S", default_value_t = 20)]
    pub seconds: u32,
    /// Reads of the page in each NMI, after one of the counter
    #[arg(long, value_name = "N", default_value_t = 65536)]
    pub reads_per_nmi: u32,
}

/// Commands of a round, which go out at once; the next follows their answers. Each
/// NMI takes the vCPU out of the guest, each republication meets it inside.
const NMIS: usize = 2;
const REPUBLICATIONS: usize = 32;

/// Events that the document's kernels survived without and with the change.
const DOCUMENT: [(&str, &str); 2] = [
    ("kernel without the change", "backward after 9 K, 115 K and 25 K events"),
    ("kernel with the change", "none in over 9 M events"),
];

const METHOD: &str = "through the control socket, as fast as it answers, vCPU 0 gets NMIs and the \
    page is republished (another sequence, the same time), 2 and 32 a round; the NMI handler reads \
    the counter MSR and returns to a routine that reads the page N times before the interrupted \
    code goes on (an NMI that hits ring 0 reads it there, 4 times); the interrupted code reads \
    both in a loop; all compare with one floor that only rises; a read of an invalid page falls \
    back to the MSR";

#[derive(Debug, Clone, Serialize)]
struct Row {
    host_kind: &'static str,
    seconds: f64,
    nmis_sent: u64,
    nmis: u64,
    nmi_reads: u64,
    main_reads: u64,
    backward: u64,
    fallbacks: u64,
    retries: u64,
    longest_invalid_ns: f64,
    republications: u64,
    republished_hz: f64,
}

/// Runs the experiment.
///
/// # Errors
/// A guest that does not run to its end.
pub fn run(common: &Common, options: &Options) -> Result<Report, VmError> {
    let words = format!(
        "source=host ms={} reads_per_nmi={} page_reads_per_msr=16384",
        u64::from(options.seconds) * 1000,
        options.reads_per_nmi
    );
    let arguments = ["--hv-tsc-page", "--cmdline", &words];
    let mut vm = common.bare("guest-nmi-storm", &arguments)?;
    vm.timeout = Duration::from_secs(u64::from(options.seconds) * 2 + 60);
    let mut round = vec![Command::Nmi { cpu: 0 }; NMIS];
    round.extend([Command::Republish {}; REPUBLICATIONS]);
    let (outcome, driven) = driven::run(vm.clone(), Begin::WithPage, &round)?;
    let lines = results::parse(&outcome.console);
    let row = lines.iter().find_map(|line| row(line, driven, label(outcome.kind)));
    let row = row.ok_or_else(|| vm.unexpected(&outcome, "no result".into()))?;
    Ok(report(&row))
}

fn row(line: &Line, driven: Driven, host_kind: &'static str) -> Option<Row> {
    let count = |key| results::number(line, key).map(|n| n as u64);
    Some(Row {
        host_kind,
        seconds: driven.elapsed.as_secs_f64(),
        nmis_sent: driven.rounds * NMIS as u64,
        nmis: count("nmis")?,
        nmi_reads: count("nmi_page_reads")? + count("nmi_msr_reads")?,
        main_reads: count("main_page_reads")? + count("main_msr_reads")?,
        backward: count("backward")?,
        fallbacks: count("nmi_fallbacks")? + count("main_fallbacks")?,
        retries: count("nmi_retries")?,
        longest_invalid_ns: results::number(line, "longest_invalid_ns")?,
        republications: driven.rounds * REPUBLICATIONS as u64,
        republished_hz: driven.hz() * REPUBLICATIONS as f64,
    })
}

fn report(row: &Row) -> Report {
    let mut report = Report::new("nmi-storm", METHOD);
    report.rows = vec![json!(row)];
    report.document =
        json!(DOCUMENT.map(|(kernel, events)| json!({"kernel": kernel, "events": events})));
    let cell = |name: &str, value: String| vec![name.into(), row.host_kind.into(), value];
    report.table = vec![
        vec!["what".into(), "host".into(), "value".into()],
        cell("seconds", figure(row.seconds)),
        cell("NMIs sent", row.nmis_sent.to_string()),
        cell("NMIs delivered", row.nmis.to_string()),
        cell("reads in NMI context", row.nmi_reads.to_string()),
        cell("reads by the interrupted code", row.main_reads.to_string()),
        cell("backward steps", row.backward.to_string()),
        cell("reads that fell back to the MSR", row.fallbacks.to_string()),
        cell("reads retried, sequence changed", row.retries.to_string()),
        cell("longest time invalid, us", figure(row.longest_invalid_ns / 1000.0)),
        cell("republished, a second", figure(row.republished_hz)),
    ];
    for (kernel, events) in DOCUMENT {
        report.notes.push(format!("the document, {kernel}: {events}"));
    }
    if row.republished_hz < 1000.0 {
        report.notes.push("republished below 1000 a second: this host is busy".into());
    }
    report
}
