//! `clocklab drift`: guest time by each clock against the host's CLOCK_MONOTONIC_RAW,
//! over minutes, with the guest idle and at work.

use super::Common;
use crate::host::label;
use crate::report::{Plot, Report, Series, Shape, figure};
use crate::results;
use crate::vm::{Outcome, Vm, VmError};
use serde::Serialize;
use serde_json::{Value, json};
use std::time::Duration;

/// What to run.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// Length of each run, up to an hour
    #[arg(long, value_name = "N", default_value_t = 10.0, value_parser = minutes)]
    pub minutes: f64,
    /// What the guest does between samples: one run each [default: both]
    #[arg(long, value_enum)]
    pub load: Vec<Load>,
}

/// What the guest does between samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Load {
    /// Sleep
    Idle,
    /// Keep all its vCPUs busy
    Busy,
}

impl Load {
    fn name(self) -> &'static str {
        match self {
            Load::Idle => "idle",
            Load::Busy => "busy",
        }
    }
}

fn minutes(text: &str) -> Result<f64, String> {
    let minutes: f64 = text.parse().map_err(|_| "write a number of minutes")?;
    let bounds = 0.05..=60.0;
    if bounds.contains(&minutes) { Ok(minutes) } else { Err("between 0.05 and 60 minutes".into()) }
}

const METHOD: &str = "a bare-metal guest reads every clock right before and right after a write to \
    the mark port, with which the VMM notes CLOCK_MONOTONIC_RAW; the middle of the two readings is \
    taken for the clock at the host's time, samples whose bracket is over 3 times the median are \
    dropped; ppm is the least-squares slope of (clock - host), positive: the guest's clock is fast; \
    uncertainty: median half bracket over the span; excursion: largest distance from that line";

/// Frequency and width in bits of the guest's clocks; the TSC's frequency is what
/// the guest was told.
const CLOCKS: [(&str, Option<f64>, u32); 5] = [
    ("page", Some(1e7), 64),
    ("msr", Some(1e7), 64),
    ("hpet", Some(1e8), 64),
    ("acpi_pm", Some(3_579_545.0), 24),
    ("tsc", None, 64),
];

/// A clock at one time.
#[derive(Debug, Clone, Copy)]
struct Sample {
    host_s: f64,
    clock_s: f64,
    /// Half of the time between the two readings.
    half_s: f64,
}

#[derive(Debug, Clone, Serialize)]
struct Row {
    clock: &'static str,
    load: &'static str,
    host_kind: &'static str,
    minutes: f64,
    ppm: f64,
    uncertainty_ppm: f64,
    excursion_us: f64,
    samples: usize,
    dropped: usize,
    /// Clock minus host in µs at seconds of the host's.
    #[serde(skip)]
    points: Vec<(f64, f64)>,
}

/// Runs the experiment.
///
/// # Errors
/// A guest that does not run to its end, or lost samples.
pub fn run(common: &Common, options: &Options) -> Result<Report, VmError> {
    let loads = if options.load.is_empty() { &[Load::Idle, Load::Busy][..] } else { &options.load };
    let mut rows = Vec::new();
    let mut notes = Vec::new();
    for load in loads {
        let vm = plan(common, options.minutes, *load)?;
        let outcome = vm.run_to_poweroff()?;
        let found = reduce(&outcome, *load);
        if found.is_empty() {
            return Err(vm.unexpected(&outcome, "samples and marks do not match".into()));
        }
        rows.extend(found);
        notes.push(host_time(&outcome, *load));
    }
    let mut report = report(&rows);
    report.notes.extend(notes.into_iter().flatten());
    Ok(report)
}

fn plan(common: &Common, minutes: f64, load: Load) -> Result<Vm, VmError> {
    // 300 samples, but at least one a PM timer's wrap (4.7 s), and the VMM keeps 1024 marks.
    let ms = minutes * 60_000.0;
    let period_ms = (ms / 300.0).clamp(50.0, 4000.0);
    let wait = if load == Load::Busy { "spin" } else { "halt" };
    let words =
        format!("samples={:.0} period_ms={period_ms:.0} wait={wait}", (ms / period_ms).ceil());
    let arguments = ["--cpus", "2", "--hv-tsc-page", "--hpet", "exit", "--cmdline", &words];
    let mut vm = common.bare("guest-drift", &arguments)?;
    vm.name = format!("guest-drift, {}", load.name());
    vm.timeout = Duration::from_secs_f64(minutes * 60.0 * 1.5 + 60.0);
    Ok(vm)
}

/// Marks of the guest, in order: CLOCK_MONOTONIC_RAW and CLOCK_MONOTONIC in ns.
fn marks(stats: &Value) -> Vec<(u64, u64)> {
    let marks = stats["marks"].as_array().map(Vec::as_slice).unwrap_or_default();
    let guest = |mark: &&Value| mark["name"].as_str().is_some_and(|n| n.starts_with("guest "));
    marks
        .iter()
        .filter(guest)
        .filter_map(|mark| Some((mark["raw_ns"].as_u64()?, mark["ns"].as_u64()?)))
        .collect()
}

fn reduce(outcome: &Outcome, load: Load) -> Vec<Row> {
    let (lines, marks) = (results::parse(&outcome.console), marks(&outcome.stats));
    if lines.len() != marks.len() || lines.len() < 3 {
        return Vec::new();
    }
    let tsc_hz = outcome.stats["tsc_hz"].as_f64().unwrap_or(1.0);
    CLOCKS
        .iter()
        .filter_map(|(clock, hz, bits)| {
            let brackets: Option<Vec<_>> =
                lines.iter().map(|line| bracket(line.get(*clock)?, *bits)).collect();
            let samples = samples(&brackets?, &marks, hz.unwrap_or(tsc_hz), *bits);
            Some(fit(clock, load, label(outcome.kind), &samples))
        })
        .collect()
}

/// The readings before and after the mark; the second less the first in a counter of
/// this width.
fn bracket(readings: &Value, bits: u32) -> Option<(u64, u64)> {
    let mask = u64::MAX >> (64 - bits);
    let (before, after) = (readings.get(0)?.as_u64()?, readings.get(1)?.as_u64()?);
    Some((before & mask, after.wrapping_sub(before) & mask))
}

/// Unwraps the counter and puts it beside the host's time, both from 0. The host's
/// time tells how often a narrow counter wrapped between two samples, no more.
fn samples(brackets: &[(u64, u64)], marks: &[(u64, u64)], hz: f64, bits: u32) -> Vec<Sample> {
    let mask = u64::MAX >> (64 - bits);
    let (first, first_ns) = (brackets[0], marks[0].0);
    let (mut last, mut last_ns, mut count) = (first.0, first_ns, 0u64);
    let wrap = 2f64.powi(bits as i32);
    let middle = |width: u64| width as f64 / 2.0;
    brackets
        .iter()
        .zip(marks)
        .map(|((before, width), (raw_ns, _))| {
            let ahead = before.wrapping_sub(last) & mask;
            let expected = (raw_ns - last_ns) as f64 / 1e9 * hz;
            let wraps = ((expected - ahead as f64) / wrap).round().max(0.0);
            count += ahead + (wraps * wrap) as u64;
            (last, last_ns) = (*before, *raw_ns);
            Sample {
                host_s: (raw_ns - first_ns) as f64 / 1e9,
                clock_s: (count as f64 + middle(*width) - middle(first.1)) / hz,
                half_s: middle(*width) / hz,
            }
        })
        .collect()
}

fn fit(clock: &'static str, load: Load, host_kind: &'static str, all: &[Sample]) -> Row {
    let mut halves: Vec<f64> = all.iter().map(|s| s.half_s).collect();
    halves.sort_by(f64::total_cmp);
    let median = halves[halves.len() / 2];
    let points: Vec<(f64, f64)> = all
        .iter()
        .filter(|s| s.half_s <= 3.0 * median)
        .map(|s| (s.host_s, (s.clock_s - s.host_s) * 1e6))
        .collect();
    let n = points.len() as f64;
    let mean = |pick: fn(&(f64, f64)) -> f64| points.iter().map(pick).sum::<f64>() / n;
    let (x, y) = (mean(|p| p.0), mean(|p| p.1));
    let slope = points.iter().map(|p| (p.0 - x) * (p.1 - y)).sum::<f64>()
        / points.iter().map(|p| (p.0 - x).powi(2)).sum::<f64>().max(f64::MIN_POSITIVE);
    let off = |p: &(f64, f64)| (p.1 - y - slope * (p.0 - x)).abs();
    let span = all.last().map_or(1.0, |s| s.host_s).max(1e-9);
    Row {
        clock,
        load: load.name(),
        host_kind,
        minutes: span / 60.0,
        ppm: slope,
        uncertainty_ppm: median * 1e6 / span,
        excursion_us: points.iter().map(off).fold(0.0, f64::max),
        samples: points.len(),
        dropped: all.len() - points.len(),
        points,
    }
}

/// How far the host's own steered clock went from the one compared with.
fn host_time(outcome: &Outcome, load: Load) -> Option<String> {
    let marks = marks(&outcome.stats);
    let (first, last) = (marks.first()?, marks.last()?);
    let (raw, steered) = ((last.0 - first.0) as f64, (last.1 - first.1) as f64);
    let ppm = (steered / raw - 1.0) * 1e6;
    Some(format!(
        "{}: the host's CLOCK_MONOTONIC itself ran {} ppm against CLOCK_MONOTONIC_RAW",
        load.name(),
        figure(ppm)
    ))
}

fn report(rows: &[Row]) -> Report {
    let mut report = Report::new("drift", METHOD);
    report.rows = rows.iter().map(|row| json!(row)).collect();
    let header =
        ["clock", "guest", "host", "minutes", "ppm", "+-", "excursion us", "samples", "dropped"];
    report.table = vec![header.map(str::to_owned).to_vec()];
    for row in rows {
        report.table.push(vec![
            row.clock.into(),
            row.load.into(),
            row.host_kind.into(),
            figure(row.minutes),
            format!("{:.4}", row.ppm),
            format!("{:.4}", row.uncertainty_ppm),
            figure(row.excursion_us),
            row.samples.to_string(),
            row.dropped.to_string(),
        ]);
    }
    report.plot = Some(Plot {
        title: "Guest clocks against the host's CLOCK_MONOTONIC_RAW".into(),
        x: "host time, s".into(),
        y: "clock minus host, us".into(),
        log_y: false,
        shape: Shape::Lines(
            rows.iter()
                .map(|row| Series {
                    name: format!("{} {}", row.clock, row.load),
                    points: row.points.clone(),
                })
                .collect(),
        ),
    });
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A 24-bit counter that wraps, 20 ppm fast, with an interrupted sample and one that
    /// came over three wraps late.
    #[test]
    fn a_known_drift_is_found_through_wraps_and_interruptions() {
        let (hz, bits) = (3_579_545.0, 24);
        let at_s = |n: u64| 4 * n + if n >= 120 { 17 } else { 0 };
        let readings: Vec<(u64, u64)> = (0..200u64)
            .map(|n| {
                let count = (at_s(n) as f64 * hz * (1.0 + 20e-6)) as u64 + 5000;
                let width = if n == 77 { 100_000 } else { 100 };
                ((count - width / 2) & 0xff_ffff, width)
            })
            .collect();
        let marks: Vec<_> = (0..200u64).map(|n| (at_s(n) * 1_000_000_000 + 7, 0)).collect();
        let row = fit("acpi_pm", Load::Idle, "software", &samples(&readings, &marks, hz, bits));
        assert!((row.ppm - 20.0).abs() < 0.01, "{row:?}");
        assert_eq!((row.samples, row.dropped), (199, 1));
        assert!(row.excursion_us < 1.0, "{row:?}");
    }
}
