//! `clocklab bringup`: how long the kernel takes to bring its other CPUs up. The
//! document is the kernel's patch thread on parallel CPU bring-up, 2021.
//!
//! The AP phase runs from the kernel's "Bringing up secondary CPUs" to its "Brought
//! up", by the times of its own log; cycles are those of the guest's TSC.

use super::{Common, linux_files};
use crate::host::label;
use crate::progress::Progress;
use crate::report::{Plot, Report, Series, Shape, figure};
use crate::resources;
use crate::results::{self, Result as Line};
use crate::vm::{Guest, Outcome, Vm, VmError};
use serde::Serialize;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::time::Duration;
use vmm::tsc::Rate;

/// The document's figures: what was parallel, and cycles for 28 CPUs.
const DOCUMENT: [(&str, u64); 3] = [
    ("serial", 246_691_584),
    ("parallel INIT/SIPI", 124_913_032),
    // kick 34 645 984 + wait-init 12 865 752 + online 11 702 224
    ("all stages parallel", 59_213_960),
];

const METHOD: &str = "from \"Bringing up secondary CPUs\" to \"Brought up\" in the guest's log (\u{b5}s \
    of its sched_clock, here kvm-clock: under other clocks it is held back by lost ticks), times \
    the TSC frequency that KVM gives the guest; exits to user space per AP over the guest's whole \
    life, exits that KVM answers itself not counted; the lowest of the runs, serial and parallel \
    alternating. In the lab the guest is told what a CPU with an invariant TSC would tell it: that \
    the TSC is reliable (so the check for warps is left out) and its delay loop (lpj=), which \
    each AP would else calibrate for 100 ms";

/// Ticks a second of Debian's kernels (CONFIG_HZ).
const HZ: f64 = 250.0;
/// Time to measure the TSC's frequency in, to some ppm.
const TSC_SPAN: Duration = Duration::from_millis(20);

/// What to measure.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// Numbers of vCPUs, from 2 [the document's: 28]
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_values_t = [2, 4, 8])]
    #[arg(value_parser = clap::value_parser!(u32).range(2..=1024))]
    pub sizes: Vec<u32>,
    /// Kernels: stable, 6.12 (parallel from 6.5 on)
    #[arg(long, value_name = "NAME,NAME", value_delimiter = ',')]
    #[arg(default_values_t = ["stable".to_owned(), "6.12".to_owned()])]
    pub kernels: Vec<String>,
    /// How often each is measured
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    pub runs: u32,
    /// More words for the guest's command line
    #[arg(long, value_name = "WORDS", default_value = "")]
    pub words: String,
}

/// One bring-up.
#[derive(Debug, Clone, Serialize)]
struct Row {
    kernel: String,
    /// What `cpuhp.parallel=` said; kernels before 6.5 know no such word.
    asked: &'static str,
    /// What the kernel did.
    parallel: bool,
    cpus: u32,
    host_kind: &'static str,
    ms: f64,
    cycles: f64,
    cycles_per_ap: f64,
    exits_per_ap: f64,
    runs: u32,
}

/// Runs the experiment.
///
/// # Errors
/// A guest that does not run, lacks a CPU, or has complaints about its CPUs.
pub fn run(common: &Common, options: &Options) -> Result<Report, VmError> {
    let files = linux_files()?;
    let mut progress = Progress::new(true);
    // The host's TSC is the lab's and its guests', too.
    let told = match common.lab.in_lab(Guest::Linux) {
        true => format!(" tsc=reliable lpj={:.0}", Rate::measure(TSC_SPAN).hz / HZ),
        false => String::new(),
    };
    let mut rows = Vec::new();
    for kernel in &options.kernels {
        let image = resources::kernel(&mut progress, Some(kernel))?;
        progress.done();
        let files: Vec<(String, PathBuf)> = files
            .iter()
            .map(|(name, path)| {
                (name.clone(), if name == "bzImage" { image.clone() } else { path.clone() })
            })
            .collect();
        for &cpus in &options.sizes {
            // Parallel is to be compared with serial: in turn, and each kernel that knows
            // the word.
            let ways = if kernel.starts_with("6.12") { &["0", "1"][..] } else { &["0"] };
            let mut lowest: Vec<Row> = Vec::new();
            for _ in 0..options.runs {
                for asked in ways {
                    let row = measure(common, options, kernel, cpus, asked, &told, &files)?;
                    match lowest.iter_mut().find(|other| other.asked == row.asked) {
                        Some(other) if other.cycles <= row.cycles => {}
                        Some(other) => *other = row,
                        None => lowest.push(row),
                    }
                }
            }
            rows.extend(lowest);
        }
    }
    Ok(report(&rows))
}

/// Brings one machine up; `told` are words that stand for what its CPU cannot tell.
fn measure(
    common: &Common,
    options: &Options,
    kernel: &str,
    cpus: u32,
    asked: &'static str,
    told: &str,
    files: &[(String, PathBuf)],
) -> Result<Row, VmError> {
    let mut words = format!("cpuhp.parallel={asked} {}", options.words);
    // The kernel says that it goes parallel in a debug message only.
    words += " \"dyndbg=file arch/x86/kernel/smpboot.c +p\"";
    const JOBS: &str = "dmesg,dmesg:match:Linux version:secondary CPUs:Brought up:Parallel CPU,\
                        clocksource,poweroff";
    words += told;
    let name = format!("{kernel} with {cpus} vCPUs, cpuhp.parallel={asked}");
    let arguments = ["--cpus", &cpus.to_string()];
    let mut vm = common.linux_with(&name, JOBS, &words, files, &arguments);
    // An emulated CPU takes its turns with all of them.
    vm.timeout = Duration::from_secs(300 + 30 * u64::from(cpus));
    let ran = vm.run_to_poweroff()?;
    row(&vm, &ran, cpus, asked, options.runs)
}

fn row(vm: &Vm, ran: &Outcome, cpus: u32, asked: &'static str, runs: u32) -> Result<Row, VmError> {
    let lines = results::parse(&ran.console);
    let wrong = |what: String| vm.unexpected(ran, what);
    let at = |words: &str| said(&lines, words).ok_or_else(|| wrong(format!("no \"{words}\"")));
    let (begin, end) = (at("smp: Bringing up secondary CPUs")?, at("smp: Brought up")?);
    let up = results::select(&lines, "job", "clocksource")
        .find_map(|line| results::number(line, "cpus"))
        .unwrap_or(0.0);
    if up != f64::from(cpus) {
        return Err(wrong(format!("{up} CPUs came up of {cpus}")));
    }
    if let Some(line) = lines.iter().find(|line| line.contains_key("defect")) {
        return Err(wrong(results::text(line, "text").unwrap_or("a defect").to_owned()));
    }
    let tsc_hz = ran.stats["tsc_hz"].as_f64().ok_or_else(|| wrong("no statistics".into()))?;
    let us = end.0 - begin.0;
    let cycles = us * tsc_hz / 1e6;
    let aps = f64::from(cpus - 1);
    Ok(Row {
        kernel: release(&lines).unwrap_or_else(|| "unknown".into()),
        asked,
        parallel: said(&lines, "smpboot: Parallel CPU startup enabled").is_some(),
        cpus,
        host_kind: label(ran.kind),
        ms: us / 1e3,
        cycles,
        cycles_per_ap: cycles / aps,
        exits_per_ap: ap_exits(&ran.stats) / aps,
        runs,
    })
}

/// The time (µs) and text of the first log line that begins so: the same words
/// stand in the middle of the logged command line.
fn said<'a>(lines: &'a [Line], words: &str) -> Option<(f64, &'a str)> {
    lines.iter().find_map(|line| {
        let text = results::text(line, "text")?;
        text.starts_with(words).then_some((results::number(line, "at_us")?, text))
    })
}

/// `6.12.1` of `Linux version 6.12.1+deb12-cloud-amd64 (…`.
fn release(lines: &[Line]) -> Option<String> {
    let (_, banner) = said(lines, "Linux version ")?;
    let version = banner.strip_prefix("Linux version ")?;
    Some(version.split(|c: char| c != '.' && !c.is_ascii_digit()).next()?.to_owned())
}

/// Exits of all vCPUs but the first, without those by our own signals.
fn ap_exits(stats: &Value) -> f64 {
    let vcpus = stats["exits"]["vcpus"].as_array();
    vcpus
        .into_iter()
        .flatten()
        .skip(1)
        .filter_map(Value::as_object)
        .flat_map(|reasons| reasons.iter().filter(|(reason, _)| *reason != "interrupted"))
        .filter_map(|(_, count)| count.as_f64())
        .sum()
}

fn mode(row: &Row) -> &'static str {
    if row.parallel { "parallel" } else { "serial" }
}

fn report(rows: &[Row]) -> Report {
    let mut report = Report::new("bringup", METHOD);
    report.rows = rows.iter().map(|row| json!(row)).collect();
    report.document = json!({
        "cpus": 28,
        "cycles": DOCUMENT.map(|(what, cycles)| json!({"what": what, "cycles": cycles})),
        "parallel_to_serial": DOCUMENT.map(|(_, cycles)| cycles as f64 / DOCUMENT[0].1 as f64),
    });
    let header =
        ["kernel", "bring-up", "vCPUs", "host", "ms", "Mcycles", "Mcycles/AP", "exits/AP", "runs"];
    report.table = vec![header.map(str::to_owned).to_vec()];
    for row in rows {
        report.table.push(vec![
            row.kernel.clone(),
            mode(row).into(),
            row.cpus.to_string(),
            row.host_kind.into(),
            figure(row.ms),
            figure(row.cycles / 1e6),
            figure(row.cycles_per_ap / 1e6),
            figure(row.exits_per_ap),
            row.runs.to_string(),
        ]);
    }
    for (what, cycles) in DOCUMENT {
        let million = cycles as f64 / 1e6;
        let mut line = vec!["document".into(), what.into(), "28".into(), "real machine".into()];
        line.extend(["-".into(), figure(million), figure(million / 27.0)]);
        line.resize(header.len(), "-".into());
        report.table.push(line);
    }
    for serial in rows.iter().filter(|row| !row.parallel) {
        let pair =
            |row: &&Row| row.parallel && (&row.kernel, row.cpus) == (&serial.kernel, serial.cpus);
        if let Some(parallel) = rows.iter().find(pair) {
            report.notes.push(format!(
                "{} with {} vCPUs: parallel takes {} of serial's cycles (the document: {} with \
                 INIT/SIPI in parallel, {} with all stages)",
                serial.kernel,
                serial.cpus,
                figure(parallel.cycles / serial.cycles),
                figure(DOCUMENT[1].1 as f64 / DOCUMENT[0].1 as f64),
                figure(DOCUMENT[2].1 as f64 / DOCUMENT[0].1 as f64),
            ));
        }
    }
    for row in rows.iter().filter(|row| row.asked == "1" && !row.parallel) {
        report.notes.push(format!("{} with {} vCPUs did not go parallel", row.kernel, row.cpus));
    }
    report.plot = Some(Plot {
        title: "Bringing up the other CPUs".into(),
        x: "vCPUs".into(),
        y: "Mcycles from the first to all".into(),
        log_y: true,
        shape: Shape::Lines(series(rows)),
    });
    report
}

/// One line for each kernel and way.
fn series(rows: &[Row]) -> Vec<Series> {
    let mut all: Vec<Series> = Vec::new();
    for row in rows {
        let name = format!("{} {}", row.kernel, mode(row));
        let point = (f64::from(row.cpus), row.cycles / 1e6);
        match all.iter_mut().find(|series| series.name == name) {
            Some(series) => series.points.push(point),
            None => all.push(Series { name, points: vec![point] }),
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::Kind;

    fn ran(parallel: &str, end_us: u64) -> Outcome {
        let log = |at: u64, text: &str| {
            format!("@result {{\"job\":\"dmesg\",\"at_us\":{at},\"text\":\"{text}\"}}\n")
        };
        let mut console = log(0, "Command line: run=dmesg:match:smp: Brought up");
        console += &log(0, "Linux version 6.12.117+deb12-cloud-amd64 (debian)");
        console += &log(900, &format!("smpboot: {parallel}"));
        console += &log(1000, "smp: Bringing up secondary CPUs ...");
        console += &log(end_us, "smp: Brought up 1 node, 3 CPUs");
        console += "@result {\"job\":\"clocksource\",\"cpus\":3}\n";
        Outcome {
            status: 0,
            console,
            stderr: String::new(),
            stats: json!({"tsc_hz": 2_000_000_000u64, "exits": {"vcpus": [
                {"port_write": 9}, {"port_write": 1, "interrupted": 7}, {"msr_read": 3}
            ]}}),
            kind: Kind::Lab,
            elapsed: Duration::ZERO,
        }
    }

    fn vm() -> Vm {
        Vm {
            name: "test".into(),
            arguments: vec![],
            files: vec![],
            timeout: Duration::ZERO,
            in_lab: true,
            shadow_paging: false,
        }
    }

    #[test]
    fn a_log_becomes_a_row() {
        let outcome = ran("Parallel CPU startup enabled: 0x80000000", 6000);
        let row = row(&vm(), &outcome, 3, "1", 1).unwrap();
        assert!(row.parallel && row.kernel == "6.12.117");
        assert_eq!((row.ms, row.cycles, row.cycles_per_ap), (5.0, 1e7, 5e6));
        assert_eq!(row.exits_per_ap, 2.0);
    }

    #[test]
    fn serial_and_parallel_are_compared() {
        let rows = [
            row(&vm(), &ran("nothing", 11_000), 3, "0", 1).unwrap(),
            row(&vm(), &ran("Parallel CPU startup enabled: 1", 6000), 3, "1", 1).unwrap(),
        ];
        let report = report(&rows);
        assert!(report.notes[0].contains("parallel takes 0.50 of serial's"), "{:?}", report.notes);
        assert_eq!(series(&rows).len(), 2);
    }

    #[test]
    fn a_missing_cpu_or_a_complaint_is_no_result() {
        let outcome = ran("nothing", 6000);
        assert!(row(&vm(), &outcome, 4, "0", 1).is_err());
        let mut complaining = outcome;
        complaining.console +=
            "@result {\"job\":\"dmesg\",\"defect\":\"BUG:\",\"text\":\"BUG: x\"}\n";
        assert!(row(&vm(), &complaining, 3, "0", 1).is_err());
    }
}
