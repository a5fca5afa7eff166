//! `clocklab cyclictest`: the real cyclictest in a stock Linux guest, by who serves
//! its timers. The document is the kernel's patch thread on housekeeping CPUs, 2019.

use super::Common;
use crate::host::{Kind, label};
use crate::progress::Progress;
use crate::report::{Plot, Report, Series, Shape, figure};
use crate::resources;
use crate::results;
use crate::vm::{Outcome, Vm, VmError};
use hdrhistogram::Histogram;
use serde::Serialize;
use serde_json::json;
use std::io;
use std::path::PathBuf;
use std::time::Duration;
use vmm::pinning;

const METHOD: &str = "Debian's cyclictest -m -p95 -i1000 -h, one thread a vCPU, in a stock Debian \
    guest; latency is how much later than asked a 1 ms sleep ends; pinned: each vCPU on a CPU of \
    its own, timers on another";

/// What to run.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// Cycles of each cyclictest thread
    #[arg(long, value_name = "N", default_value_t = 1000)]
    pub loops: u32,
    /// vCPUs
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub vcpus: u32,
}

/// Latencies above this many microseconds are counted and not told apart.
const HISTOGRAM_US: u32 = 20_000;

/// Name, what `vmm` is told, and the clockevent that the guest must then choose.
const MODES: [(&str, &[&str], &str); 3] = [
    ("kernel", &["--hv-tsc-page"], "lapic-deadline"),
    ("offload", &["--hv-tsc-page", "--lapic-timer", "offload"], "lapic-deadline"),
    ("stimer", &["--hv-stimer"], "Hyper-V clockevent"),
];

/// A row of the report.
#[derive(Debug, Clone, Serialize)]
struct Row {
    timer: &'static str,
    pinned: bool,
    host_kind: &'static str,
    /// Whether the figures mean anything beyond "it works".
    absolute: bool,
    clockevent: String,
    cycles: u64,
    /// Cycles asked for and not done: must be 0.
    lost: u64,
    /// Sleeps that ended before their time, in cyclictest and a sleep test: must be 0.
    early: u64,
    us_min: i64,
    us_avg: f64,
    us_p50: u64,
    us_p99: u64,
    us_max: u64,
    defects: u64,
}

/// Runs the experiment, one guest after the other: they would disturb each other.
///
/// # Errors
/// cyclictest is not installed; a guest that does not run or takes another timer.
pub fn run(common: &Common, options: &Options) -> Result<Report, VmError> {
    let files = files()?;
    let (mut rows, mut curves, mut refusals) = (Vec::new(), Vec::new(), Vec::new());
    for (timer, arguments, clockevent) in MODES {
        for pinned in [false, true] {
            let vm = vm(common, options, &files, timer, arguments, pinned);
            // The lab has one CPU: there is nothing to choose.
            if pinned && vm.in_lab {
                continue;
            }
            let ran = vm.run()?;
            let wrong = |what: String| vm.unexpected(&ran, what);
            if ran.status == 35 && timer == "offload" {
                refusals.push(ran.stderr.trim().to_owned());
                continue;
            }
            if ran.status != 0 {
                return Err(wrong(format!("vmm ended with {}", ran.status)));
            }
            let summary = Summary::parse(&ran.console)
                .ok_or_else(|| wrong("no histogram of cyclictest".into()))?;
            let row = row(timer, pinned, options, &summary, &ran);
            if row.clockevent != clockevent {
                let found = &row.clockevent;
                return Err(wrong(format!("the guest's clockevent is {found}, not {clockevent}")));
            }
            curves.push(curve(&row, &summary.merged));
            rows.push(row);
        }
    }
    let mut report = report(&rows, curves);
    refusals.dedup();
    report.notes.extend(refusals);
    Ok(report)
}

/// The guest's files: an initramfs with cyclictest in it.
fn files() -> Result<Vec<(String, PathBuf)>, VmError> {
    const PROGRAM: &str = "/usr/bin/cyclictest";
    if !std::path::Path::new(PROGRAM).is_file() {
        let hint = "not installed: resources/packages rt-tests installs it";
        return Err(VmError::Host(PROGRAM.into(), io::Error::new(io::ErrorKind::NotFound, hint)));
    }
    let mut progress = Progress::new(true);
    let kernel = resources::kernel(&mut progress, None)?;
    let init = resources::program(&mut progress, "init")?;
    let initramfs = init.with_file_name("cyclictest.cpio");
    let contents = [("/init".into(), init), ("/bin/cyclictest".into(), PathBuf::from(PROGRAM))];
    resources::initramfs(&mut progress, &initramfs, &contents)?;
    Ok(vec![("bzImage".into(), kernel), ("initrd".into(), initramfs)])
}

fn vm(
    common: &Common,
    options: &Options,
    files: &[(String, PathBuf)],
    name: &str,
    arguments: &[&str],
    pinned: bool,
) -> Vm {
    // Rows of zeros stay in the guest: its console is slow.
    let jobs = format!(
        "clocksource:interrupts,sleep-test:100:20,\
         exec:/bin/sh:-c:cyclictest -m -p95 -i1000 -h{HISTOGRAM_US} -l{} -q -t -a \
         | grep -v -E '^[0-9]{{6}}[^1-9]*$',dmesg,poweroff",
        options.loops
    );
    let cpus = options.vcpus.max(1).to_string();
    let mut all = arguments.to_vec();
    all.extend(["--cpus", &cpus]);
    let (pin, keeper) = placement(&pinning::allowed_cpus().0);
    if pinned {
        all.extend(["--pin", &pin, "--housekeeping", &keeper]);
    }
    let load = if pinned { ", pinned" } else { "" };
    let name = format!("cyclictest on {name}{load}");
    let mut vm = common.linux(&name, &jobs, files, &all);
    // An emulated machine that shares its host may have a tenth of a CPU.
    vm.timeout = Duration::from_secs(900);
    vm
}

/// vCPUs on all CPUs but the first, which is left to the timers.
fn placement(allowed: &[u32]) -> (String, String) {
    let (keeper, rest) = allowed.split_first().map_or((0, &[][..]), |(first, rest)| (*first, rest));
    let own: Vec<_> = if rest.is_empty() { vec![keeper] } else { rest.to_vec() };
    let own: Vec<_> = own.iter().map(u32::to_string).collect();
    (own.join(","), keeper.to_string())
}

/// What cyclictest printed.
#[derive(Debug)]
struct Summary {
    /// Microseconds, of all threads.
    merged: Histogram<u64>,
    /// Cycles done by all threads, those beyond the histogram too.
    cycles: u64,
    min: i64,
    avg: f64,
    max: u64,
}

impl Summary {
    /// Reads the histogram (one row a microsecond, one column a thread) and the
    /// lines after it.
    fn parse(console: &str) -> Option<Self> {
        let start = console.lines().position(|line| line.trim() == "# Histogram")?;
        let mut merged = Histogram::new(3).ok()?;
        let mut cycles = 0;
        let mut after = std::collections::BTreeMap::new();
        for line in console.lines().skip(start + 1) {
            if let Some((name, values)) = line.strip_prefix("# ").and_then(|l| l.split_once(':')) {
                let values: Vec<i64> =
                    values.split_whitespace().map_while(|v| v.parse().ok()).collect();
                after.entry(name.trim().to_owned()).or_insert(values);
                continue;
            }
            let mut words = line.split_whitespace().map_while(|word| word.parse::<u64>().ok());
            if let Some(us) = words.next() {
                let count: u64 = words.sum();
                merged.record_n(us, count).ok()?;
                cycles += count;
            }
        }
        let values = |name: &str| after.get(name).filter(|values| !values.is_empty());
        let overflows: i64 = values("Histogram Overflows")?.iter().sum();
        let averages = values("Avg Latencies")?;
        Some(Self {
            merged,
            cycles: cycles + u64::try_from(overflows).ok()?,
            min: *values("Min Latencies")?.iter().min()?,
            avg: averages.iter().sum::<i64>() as f64 / averages.len() as f64,
            max: u64::try_from(*values("Max Latencies")?.iter().max()?).ok()?,
        })
    }
}

fn row(
    timer: &'static str,
    pinned: bool,
    options: &Options,
    summary: &Summary,
    ran: &Outcome,
) -> Row {
    let lines = results::parse(&ran.console);
    let sum = |job: &str, key: &str| -> u64 {
        let found = results::select(&lines, "job", job);
        found.filter_map(|line| results::number(line, key)).sum::<f64>() as u64
    };
    let mut clockevents: Vec<_> = results::select(&lines, "job", "clocksource")
        .filter_map(|line| line.get("clockevents")?.as_array())
        .flatten()
        .filter_map(|name| name.as_str())
        .collect();
    clockevents.dedup();
    let wanted = u64::from(options.loops) * u64::from(options.vcpus.max(1));
    Row {
        timer,
        pinned,
        host_kind: label(ran.kind),
        absolute: matches!(ran.kind, Kind::Direct(_)),
        clockevent: clockevents.join(", "),
        cycles: summary.cycles,
        lost: wanted.saturating_sub(summary.cycles),
        early: sum("sleep-test", "early") + u64::from(summary.min < 0),
        us_min: summary.min,
        us_avg: summary.avg,
        us_p50: summary.merged.value_at_quantile(0.5),
        us_p99: summary.merged.value_at_quantile(0.99),
        us_max: summary.max,
        defects: sum("dmesg", "defects"),
    }
}

fn curve(row: &Row, latencies_us: &Histogram<u64>) -> Series {
    let point = |percent: u32| {
        let us = latencies_us.value_at_quantile(f64::from(percent) / 100.0).max(1);
        (f64::from(percent), us as f64)
    };
    let name = format!("{}{}", row.timer, if row.pinned { ", pinned" } else { "" });
    Series { name, points: (1..=100).map(point).collect() }
}

fn report(rows: &[Row], curves: Vec<Series>) -> Report {
    let mut report = Report::new("cyclictest", METHOD);
    report.rows = rows.iter().map(|row| json!(row)).collect();
    report.document = json!({"us": {"with housekeeping fix": "4-5", "without": 8}});
    let header = [
        "timer",
        "pinned",
        "host",
        "clockevent",
        "cycles",
        "lost",
        "early",
        "min us",
        "avg us",
        "p50 us",
        "p99 us",
        "max us",
    ];
    report.table = vec![header.map(str::to_owned).to_vec()];
    for row in rows {
        report.table.push(vec![
            row.timer.into(),
            if row.pinned { "yes" } else { "no" }.into(),
            row.host_kind.into(),
            row.clockevent.clone(),
            row.cycles.to_string(),
            row.lost.to_string(),
            row.early.to_string(),
            row.us_min.to_string(),
            figure(row.us_avg),
            row.us_p50.to_string(),
            row.us_p99.to_string(),
            row.us_max.to_string(),
        ]);
    }
    for (name, us) in [("document, with the fix", "4-5"), ("document, without", "8")] {
        let mut line = vec![name.into(), "yes".into(), "hardware".into()];
        line.resize(header.len(), "-".to_owned());
        line[8] = us.into();
        report.table.push(line);
    }
    if rows.iter().any(|row| !row.absolute) {
        report.notes.push(
            "nested, emulated: latencies are the emulator's and mean nothing beside the document's \
             4-5 us and 8 us; what counts here is that no cycle is lost and none ends early"
                .into(),
        );
    }
    let wrong: u64 = rows.iter().map(|row| row.lost + row.early).sum();
    report.notes.push(format!("lost cycles and early wake-ups: {wrong} (must be 0)"));
    for row in rows.iter().filter(|row| row.defects > 0) {
        report.notes.push(format!("{}: the guest's kernel complains {} x", row.timer, row.defects));
    }
    report.plot = Some(Plot {
        title: "cyclictest in a Linux guest".into(),
        x: "share of cycles, %".into(),
        y: "latency, us".into(),
        log_y: true,
        shape: Shape::Lines(curves),
    });
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_histogram_of_two_threads_is_merged() {
        let console = "# /dev/cpu_dma_latency set to 0us\r\n# Histogram\r\n\
                       000016 000002\t000000\r\n000017 000006\t000002\r\n\
                       # Total: 000000009 000000002\r\n# Min Latencies: 00016 00017\r\n\
                       # Avg Latencies: 00020 00030\r\n# Max Latencies: 00040 25000\r\n\
                       # Histogram Overflows: 00001 00002\r\n# Thread 0: 00003\r\n";
        let summary = Summary::parse(console).unwrap();
        assert_eq!((summary.cycles, summary.min, summary.max), (13, 16, 25000));
        assert_eq!(summary.merged.len(), 10);
        assert_eq!(summary.avg, 25.0);
        assert!(Summary::parse("# Histogram\n").is_none());
    }

    #[test]
    fn timers_keep_off_the_vcpus_where_there_is_room() {
        assert_eq!(placement(&[0, 1, 2]), ("1,2".into(), "0".into()));
        assert_eq!(placement(&[3]), ("3".into(), "3".into()));
    }
}
