//! `clocklab order`: a timestamp handed round all vCPUs, each of which reads a clock
//! and compares, while the page is republished and the clock's rate swings.

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
    /// Hops from vCPU to vCPU in each run
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    pub hops: u64,
    /// vCPUs
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(2..=1024))]
    pub cpus: u32,
    /// Clocks read: one run each [default: all four]
    #[arg(long, value_enum)]
    pub mix: Vec<Mix>,
    /// Leave page and rate alone
    #[arg(long)]
    pub undisturbed: bool,
}

/// Which clocks the vCPUs read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Mix {
    /// The TSC page
    Page,
    /// The counter MSR
    Msr,
    /// The HPET
    Hpet,
    /// Each hop one of the three, at random
    All,
}

impl Mix {
    const EACH: [Mix; 4] = [Mix::Page, Mix::Msr, Mix::Hpet, Mix::All];

    fn word(self) -> &'static str {
        match self {
            Mix::Page => "page",
            Mix::Msr => "msr",
            Mix::Hpet => "hpet",
            Mix::All => "all",
        }
    }
}

/// The rate swings by this much and back, in parts per 10⁹: the most that one step may.
const SWING_PPB: i32 = 50;

const METHOD: &str = "a bare-metal guest hands a timestamp from vCPU to vCPU through memory; who \
    has it reads a clock: page and MSR may not be below the last reading of either by anybody, the \
    HPET not below its own last, and all differences of the two must overlap within one tick; \
    meanwhile the page is republished and the clock's rate moved by 100 ppb and back through the \
    control socket, twice each a round";

#[derive(Debug, Clone, Serialize)]
struct Row {
    mix: String,
    host_kind: &'static str,
    cpus: u64,
    hops: u64,
    backward: u64,
    hpet_apart: Option<u64>,
    page_fallbacks: u64,
    seconds: f64,
    changes: u64,
    changes_hz: f64,
}

/// Runs the experiment.
///
/// # Errors
/// A guest that does not run to its end.
pub fn run(common: &Common, options: &Options) -> Result<Report, VmError> {
    let round: &[Command] = if options.undisturbed {
        &[Command::Status {}]
    } else {
        &[
            Command::Republish {},
            Command::Slew { ppb: SWING_PPB },
            Command::Republish {},
            Command::Slew { ppb: -SWING_PPB },
        ]
    };
    let mixes = if options.mix.is_empty() { &Mix::EACH[..] } else { &options.mix };
    let cpus = options.cpus.to_string();
    let mut rows = Vec::new();
    for mix in mixes {
        let words = format!("mix={} hops={} cpus={cpus}", mix.word(), options.hops);
        let arguments = [
            "--cpus",
            &cpus,
            "--hv-tsc-page",
            "--hpet",
            "exit",
            "--clock-discipline",
            "off",
            "--cmdline",
            &words,
        ];
        let mut vm = common.bare("guest-order", &arguments)?;
        // A busy host takes up to 1 ms a hop.
        vm.timeout = Duration::from_secs(120 + options.hops / 1000);
        let (outcome, driven) = driven::run(vm.clone(), Begin::AtOnce, round)?;
        let lines = results::parse(&outcome.console);
        let changes = if options.undisturbed { 0 } else { round.len() as u64 };
        let row = lines.iter().find_map(|line| row(line, driven, changes, label(outcome.kind)));
        rows.push(row.ok_or_else(|| vm.unexpected(&outcome, "no result".into()))?);
    }
    Ok(report(&rows))
}

fn row(line: &Line, driven: Driven, changes: u64, host_kind: &'static str) -> Option<Row> {
    let count = |key| results::number(line, key).map(|n| n as u64);
    Some(Row {
        mix: results::text(line, "mix")?.to_owned(),
        host_kind,
        cpus: count("cpus")?,
        hops: count("hops")?,
        backward: count("backward")?,
        hpet_apart: count("hpet_apart"),
        page_fallbacks: count("page_fallbacks")?,
        seconds: driven.elapsed.as_secs_f64(),
        changes: driven.rounds * changes,
        changes_hz: driven.hz() * changes as f64,
    })
}

fn report(rows: &[Row]) -> Report {
    let mut report = Report::new("order", METHOD);
    report.rows = rows.iter().map(|row| json!(row)).collect();
    let header = [
        "clocks",
        "host",
        "vCPUs",
        "hops",
        "backward",
        "HPET apart",
        "fell back",
        "seconds",
        "changes",
        "changes/s",
    ];
    report.table = vec![header.map(str::to_owned).to_vec()];
    for row in rows {
        report.table.push(vec![
            row.mix.clone(),
            row.host_kind.into(),
            row.cpus.to_string(),
            row.hops.to_string(),
            row.backward.to_string(),
            row.hpet_apart.map_or("-".into(), |n| n.to_string()),
            row.page_fallbacks.to_string(),
            figure(row.seconds),
            row.changes.to_string(),
            figure(row.changes_hz),
        ]);
    }
    report
}
