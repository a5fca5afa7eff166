//! `clocklab hpet-contention`: every vCPU reads the one HPET at once, and what a
//! workload loses that reads it. The document is the kernel's patch thread on HPET counter
//! read contention, 2016.
//!
//! The document's machines queue for the device; here a read is an exit, or a read
//! of a page. The workload is a fixed computation before each read, calibrated so
//! that one vCPU alone spends the document's share of its time in reads that exit;
//! then the same computation runs with the TSC in the HPET's place.

use super::contention_model::Load;
use super::{Common, linux_files, run_all};
use crate::host::label;
use crate::report::{Plot, Report, Series, Shape, figure};
use crate::results::{self, Result as Line};
use crate::vm::{Outcome, Vm, VmError, sibling};
use serde::Serialize;
use serde_json::{Value, json};
use std::process::Command;

/// What to measure.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// Measure with 1 to N vCPUs [default: as many as this machine has CPUs]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    cpus: Option<u32>,
    /// Length of each bare-metal measurement in ms
    #[arg(long, value_name = "MS", default_value_t = 1000)]
    ms: u32,
    /// Measure everything so often, and keep the best
    #[arg(long, value_name = "N", default_value_t = 3)]
    runs: u32,
    /// Extend the curve to N vCPUs by a model
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=4096))]
    simulate_cpus: Option<u32>,
    /// Leave the Linux guest out
    #[arg(long)]
    bare_only: bool,
}

/// The document's machines: share of CPU time in reads, and throughput on HPET, in
/// hundredths of a percent of the time and percent of that on TSC.
const DOCUMENT: [(&str, u64, f64); 4] = [
    ("72 cores, each read alone", 499, 87.7),
    ("72 cores, reads shared", 141, 98.8),
    ("240 CPUs, each read alone", 3400, 35.2),
    ("240 CPUs, reads shared", 296, 96.0),
];

const METHOD: &str = "bare-metal guest in ring 3: all vCPUs read the 64-bit counter in a loop for \
    the time given; reads/s is the sum of each vCPU's reads over its own time, ns/read its \
    reciprocal for one vCPU; p50 and p99 are of single reads between two ordered RDTSC; backward \
    counts reads below the same vCPU's last one, or below what any vCPU had seen before the read \
    began; of several runs the fastest counts, for a shared machine only slows down; floor: a bare \
    KVM_RUN loop that answers the same read";

/// Where a read of the HPET goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Exit,
    Page,
    /// The bare loop.
    Floor,
}

impl Mode {
    fn name(self) -> &'static str {
        match self {
            Mode::Exit => "exit",
            Mode::Page => "page",
            Mode::Floor => "floor",
        }
    }
}

/// The computation before each read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Work {
    None,
    /// So that reads take this many hundredths of a percent.
    Share(u64),
    Steps(u64),
}

/// One measurement, to be repeated.
#[derive(Debug, Clone, Copy)]
struct Trial {
    mode: Mode,
    clock: &'static str,
    cpus: u32,
    work: Work,
}

/// The fastest of its runs.
#[derive(Debug, Clone)]
struct Best {
    reads_per_s: f64,
    by_cpu: Vec<f64>,
    ns_p50: f64,
    ns_p99: f64,
    /// Of all runs.
    backward: u64,
    reads: u64,
    work: u64,
    /// Time between two stores of the page's counter.
    resolution_ns: Option<f64>,
    /// Our own time in an exit.
    handling_ns: Option<f64>,
    host_kind: &'static str,
}

/// One line of the report.
#[derive(Debug, Clone, Default, Serialize)]
struct Row {
    part: &'static str,
    what: String,
    cpus: u32,
    host_kind: &'static str,
    reads_per_s: f64,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    reads_per_s_by_cpu: Vec<f64>,
    ns_per_read: Option<f64>,
    ns_p50: Option<f64>,
    ns_p99: Option<f64>,
    reads: Option<u64>,
    backward: Option<u64>,
    resolution_ns: Option<f64>,
    share_percent: Option<f64>,
    percent_of_tsc: Option<f64>,
    document_percent: Option<f64>,
}

/// Runs the experiment.
///
/// # Errors
/// A guest that does not run, or says nothing.
pub fn run(common: &Common, options: &Options) -> Result<Report, VmError> {
    let here = std::thread::available_parallelism().map_or(1, usize::from);
    let most = options.cpus.unwrap_or(u32::try_from(here).unwrap_or(1));
    let bench = Bench { common, options };
    let mut report = Report::new("hpet-contention", METHOD);

    let trial = |mode, cpus| Trial { mode, clock: "hpet", cpus, work: Work::None };
    let trials: Vec<_> = [Mode::Floor, Mode::Exit, Mode::Page]
        .into_iter()
        .flat_map(|mode| (1..=most).map(move |cpus| trial(mode, cpus)))
        .filter(|trial| trial.mode != Mode::Floor || bench.floor_runs())
        .collect();
    let reads = bench.measure(&trials)?;
    let mut rows: Vec<Row> = reads.iter().map(|(trial, best)| read_row(trial, best)).collect();
    report.notes.extend(ratios(&reads, most));

    let workload = bench.workload(most)?;
    rows.extend(workload.iter().flat_map(Workload::rows));
    if !options.bare_only {
        let linux = linux(common, most)?;
        if linux.len() < 2 {
            report.notes.push("no Linux row for page: the lab has no CPU for its thread".into());
        }
        rows.extend(linux);
    }
    if let Some(cpus) = options.simulate_cpus {
        let (model, checks) = model(&reads, &workload, most, cpus);
        rows.extend(model);
        report.notes.extend(checks);
    }
    if most as usize >= here {
        report.notes.push(format!(
            "page with {here} or more vCPUs: the thread that stores the counter has no CPU of its \
             own and takes its share of the vCPUs' time"
        ));
    }
    report.document = json!(DOCUMENT.map(|(machine, share, percent)| json!({
        "machine": machine, "share_percent": share as f64 / 100.0, "percent_of_tsc": percent,
    })));
    report.table = table(&rows);
    report.plot = Some(plot(&rows));
    report.rows = rows.iter().map(|row| json!(row)).collect();
    Ok(report)
}

/// Runs trials.
struct Bench<'a> {
    common: &'a Common,
    options: &'a Options,
}

impl Bench<'_> {
    /// The bare loop is a program of this machine, not of the lab.
    fn floor_runs(&self) -> bool {
        !self.common.lab.in_lab(crate::vm::Guest::Bare)
    }

    /// All trials in turn, again and again, so that none has the quiet time alone.
    fn measure(&self, trials: &[Trial]) -> Result<Vec<(Trial, Best)>, VmError> {
        let mut best: Vec<Option<Best>> = vec![None; trials.len()];
        for _ in 0..self.options.runs.max(1) {
            for (trial, best) in trials.iter().zip(&mut best) {
                let new = self.once(trial)?;
                let backward = new.backward + best.as_ref().map_or(0, |old| old.backward);
                if best.as_ref().is_none_or(|old| new.reads_per_s > old.reads_per_s) {
                    *best = Some(new);
                }
                best.iter_mut().for_each(|best| best.backward = backward);
            }
        }
        Ok(trials.iter().copied().zip(best.into_iter().flatten()).collect())
    }

    fn once(&self, trial: &Trial) -> Result<Best, VmError> {
        const GUEST: &str = "guest-hpet-contention";
        let Trial { mode, clock, cpus, work } = *trial;
        let work = match work {
            Work::None => String::new(),
            Work::Share(bp) => format!(" share_bp={bp}"),
            Work::Steps(steps) => format!(" work={steps}"),
        };
        // A timed read costs more than one of the page: where nothing else takes time, few.
        let every = if mode == Mode::Page && work.is_empty() { 1024 } else { 16 };
        let ms = self.options.ms;
        let words = format!("clock={clock} ms={ms} check_every={every} cpus={cpus}{work}");
        let cpus = cpus.to_string();
        if mode == Mode::Floor {
            return floor(GUEST, &cpus, &words);
        }
        let arguments = ["--hpet", mode.name(), "--cpus", &cpus, "--hv-tsc-page"];
        let vm = self.common.bare(GUEST, &[&arguments[..], &["--cmdline", &words]].concat())?;
        let ran = vm.run_to_poweroff()?;
        let line = only_line(&ran.console).ok_or_else(|| missing(&vm, &ran))?;
        let mut best = Best::of(&line, label(ran.kind)).ok_or_else(|| missing(&vm, &ran))?;
        best.resolution_ns = ran.stats["hpet"]["page"]["mean_ns"].as_f64();
        best.handling_ns = handling_ns(&ran.stats);
        Ok(best)
    }

    /// The document's workload, on each clock and number of vCPUs.
    fn workload(&self, most: u32) -> Result<Vec<Workload>, VmError> {
        let mut all = Vec::new();
        for (machine, share_bp, document_percent) in DOCUMENT {
            let calibrate =
                Trial { mode: Mode::Exit, clock: "hpet", cpus: 1, work: Work::Share(share_bp) };
            let steps = self.once(&calibrate)?.work;
            for cpus in 1..=most {
                let trial = |mode, clock| Trial { mode, clock, cpus, work: Work::Steps(steps) };
                let trials = [
                    trial(Mode::Exit, "tsc"),
                    trial(Mode::Exit, "hpet"),
                    trial(Mode::Page, "hpet"),
                ];
                let measured = self.measure(&trials)?;
                let [tsc, exit, page] = &measured[..] else { unreachable!("three trials") };
                all.push(Workload {
                    machine,
                    share_bp,
                    document_percent,
                    cpus,
                    tsc: tsc.1.clone(),
                    exit: exit.1.clone(),
                    page: page.1.clone(),
                });
            }
        }
        Ok(all)
    }
}

fn missing(vm: &Vm, ran: &Outcome) -> VmError {
    vm.unexpected(ran, "the guest told no reads".into())
}

/// One share of the document, with one number of vCPUs.
struct Workload {
    machine: &'static str,
    share_bp: u64,
    document_percent: f64,
    cpus: u32,
    tsc: Best,
    exit: Best,
    page: Best,
}

impl Workload {
    fn rows(&self) -> Vec<Row> {
        let row = |mode: &str, best: &Best| Row {
            part: "workload",
            what: format!("{mode}, as {}", self.machine),
            cpus: self.cpus,
            host_kind: best.host_kind,
            reads_per_s: best.reads_per_s,
            reads: Some(best.reads),
            backward: Some(best.backward),
            share_percent: Some(self.share_bp as f64 / 100.0),
            percent_of_tsc: Some(best.reads_per_s / self.tsc.reads_per_s * 100.0),
            document_percent: Some(self.document_percent),
            ..Row::default()
        };
        vec![row("exit", &self.exit), row("page", &self.page)]
    }
}

impl Best {
    fn of(line: &Line, host_kind: &'static str) -> Option<Self> {
        let number = |key| results::number(line, key);
        let (reads, reads_per_s) = (number("reads")?, number("reads_per_s")?);
        let each = line.get("reads_each")?.as_array()?.iter().filter_map(Value::as_f64);
        Some(Self {
            reads_per_s,
            by_cpu: each.map(|own| own / reads * reads_per_s).collect(),
            ns_p50: number("ns_p50")?,
            ns_p99: number("ns_p99")?,
            backward: number("backward")? as u64,
            reads: reads as u64,
            work: number("work")? as u64,
            resolution_ns: None,
            handling_ns: None,
            host_kind,
        })
    }

    fn ns_per_read(&self) -> f64 {
        1e9 * self.by_cpu.len() as f64 / self.reads_per_s
    }
}

fn only_line(console: &str) -> Option<Line> {
    results::parse(console).into_iter().find(|line| line.contains_key("reads_each"))
}

/// Runs the guest under the bare loop.
fn floor(guest: &str, cpus: &str, words: &str) -> Result<Best, VmError> {
    let failed = |what: &str| {
        let what = what.to_owned();
        move |e| VmError::Host(what, e)
    };
    let ran = Command::new(sibling("bare-loop")?)
        .arg("--kernel")
        .arg(sibling(guest)?)
        .args(["--cpus", cpus, "--cmdline", words])
        .output()
        .map_err(failed("bare-loop"))?;
    let console = String::from_utf8_lossy(&ran.stdout);
    let kind = label(crate::host::Kind::Direct(vmm::host::HostKind::detect()));
    only_line(&console).and_then(|line| Best::of(&line, kind)).ok_or_else(|| VmError::Unexpected {
        name: "bare-loop".into(),
        what: "the guest told no reads".into(),
        tail: crate::lab::tail(&[&ran.stdout[..], &ran.stderr[..]].concat()),
    })
}

/// Our share of an exit for a read of the HPET, on average.
fn handling_ns(stats: &Value) -> Option<f64> {
    let rows = stats["exits"]["mmio"].as_array()?;
    let reads = &rows.iter().find(|row| row["name"] == "hpet")?["reads"];
    let count = reads["count"].as_f64().filter(|count| *count > 0.0)?;
    Some(reads["total_ns"].as_f64()? / count)
}

fn read_row(trial: &Trial, best: &Best) -> Row {
    Row {
        part: "read",
        what: trial.mode.name().into(),
        cpus: trial.cpus,
        host_kind: best.host_kind,
        reads_per_s: best.reads_per_s,
        reads_per_s_by_cpu: best.by_cpu.clone(),
        ns_per_read: Some(best.ns_per_read()),
        ns_p50: Some(best.ns_p50),
        ns_p99: Some(best.ns_p99),
        reads: Some(best.reads),
        backward: Some(best.backward),
        resolution_ns: best.resolution_ns,
        ..Row::default()
    }
}

fn find(reads: &[(Trial, Best)], mode: Mode, cpus: u32) -> Option<&Best> {
    reads.iter().find(|(trial, _)| trial.mode == mode && trial.cpus == cpus).map(|(_, best)| best)
}

/// What the rows come to.
fn ratios(reads: &[(Trial, Best)], most: u32) -> Vec<String> {
    let mut notes = Vec::new();
    let rate = |mode, cpus| find(reads, mode, cpus).map(|best| best.reads_per_s);
    for cpus in 2..=most {
        if let (Some(one), Some(many)) = (rate(Mode::Exit, 1), rate(Mode::Exit, cpus)) {
            let ratio = figure(many / one);
            notes.push(format!("exit: {cpus} vCPUs together read {ratio}x as often as one"));
        }
    }
    for cpus in 1..=most {
        if let (Some(ours), Some(floor)) = (rate(Mode::Exit, cpus), rate(Mode::Floor, cpus)) {
            let percent = figure(ours / floor * 100.0);
            notes.push(format!("exit, {cpus} vCPUs: {percent} % of the bare loop's rate"));
        }
    }
    let cost = |mode| find(reads, mode, 1).map(Best::ns_per_read);
    if let (Some(exit), Some(page)) = (cost(Mode::Exit), cost(Mode::Page)) {
        notes.push(format!(
            "one vCPU: a read of the page costs {} ns, one that exits {} ns: {}x",
            figure(page),
            figure(exit),
            figure(exit / page)
        ));
    }
    if let Some(resolution) = find(reads, Mode::Page, 1).and_then(|best| best.resolution_ns) {
        notes.push(format!(
            "page: the counter was stored every {} ns on average, by one busy thread",
            figure(resolution)
        ));
    }
    notes
}

/// A Linux guest on the HPET, all its CPUs in `clock_gettime` at once.
fn linux(common: &Common, cpus: u32) -> Result<Vec<Row>, VmError> {
    let files = linux_files()?;
    let count = cpus.to_string();
    const JOBS: &str = "clocksource,contend:3,poweroff";
    let vm = |mode: &str| {
        let name = format!("Linux on the HPET, {mode}");
        let arguments = ["--hpet", mode, "--cpus", &count];
        common.linux_with(&name, JOBS, "clocksource=hpet", &files, &arguments)
    };
    // The lab has one CPU: there is none for the thread that stores the counter, and Linux
    // takes a counter that stands still for 200 000 cycles for a broken one.
    let in_lab = common.lab.in_lab(crate::vm::Guest::Linux);
    let modes = if in_lab { &["exit"][..] } else { &["exit", "page"] };
    let vms: Vec<Vm> = modes.iter().map(|mode| vm(mode)).collect();
    let mut rows = Vec::new();
    for ((mode, vm), ran) in modes.iter().zip(&vms).zip(run_all(&vms)?) {
        let lines = results::parse(&ran.console);
        let contend = results::select(&lines, "job", "contend").next();
        let line = contend.ok_or_else(|| missing(vm, &ran))?;
        if results::text(line, "clock") != Some("hpet") {
            return Err(vm.unexpected(&ran, "the guest does not run on its HPET".into()));
        }
        let number = |key| results::number(line, key).unwrap_or(f64::NAN);
        let by_cpu = line.get("reads_per_s_by_cpu").and_then(Value::as_array);
        rows.push(Row {
            part: "linux",
            what: format!("{mode}, clock_gettime"),
            cpus,
            host_kind: label(ran.kind),
            reads_per_s: number("reads_per_s"),
            reads_per_s_by_cpu: by_cpu.into_iter().flatten().filter_map(Value::as_f64).collect(),
            ns_per_read: Some(1e9 * f64::from(cpus) / number("reads_per_s")),
            reads: Some(number("reads") as u64),
            backward: Some((number("backward") + number("backward_between_cpus")) as u64),
            resolution_ns: ran.stats["hpet"]["page"]["mean_ns"].as_f64(),
            ..Row::default()
        });
    }
    Ok(rows)
}

/// The curve beyond the CPUs that are here, and how far the model is from what
/// was measured.
fn model(
    reads: &[(Trial, Best)],
    workload: &[Workload],
    most: u32,
    cpus: u32,
) -> (Vec<Row>, Vec<String>) {
    let Some(one) = find(reads, Mode::Exit, 1) else { return Default::default() };
    let read_ns = one.ns_per_read();
    let growth = find(reads, Mode::Exit, 2).map_or(0.0, |two| two.ns_per_read() - read_ns);
    let locked_ns = one.handling_ns.unwrap_or(0.0);
    let spread = one.ns_p99 / one.ns_p50;
    let free = Load {
        cpus: 1,
        work_ns: 0.0,
        read_ns,
        read_spread: spread,
        serial_ns: 0.0,
        per_other_ns: 0.0,
    };
    let variants = [
        ("exit, nothing shared", free),
        ("exit, 2nd vCPU's loss for each other", Load { per_other_ns: growth.max(0.0), ..free }),
        ("exit, one lock around each read", Load { serial_ns: locked_ns, ..free }),
    ];
    let mut rows = Vec::new();
    for (what, load) in variants {
        let points = std::iter::successors(Some(1), |n| Some(n * 2)).take_while(|n| *n < cpus);
        for n in points.chain([cpus]) {
            rows.push(Row {
                part: "model",
                what: what.into(),
                cpus: n,
                host_kind: "model",
                reads_per_s: Load { cpus: n, ..load }.reads_per_s(),
                ..Row::default()
            });
        }
        for share in workload.iter().filter(|w| w.cpus == 1) {
            let work_ns = share.tsc.ns_per_read();
            let rate = Load { cpus, work_ns, ..load }.reads_per_s();
            rows.push(Row {
                part: "model",
                what: format!("{what}, as {}", share.machine),
                cpus,
                host_kind: "model",
                reads_per_s: rate,
                share_percent: Some(share.share_bp as f64 / 100.0),
                percent_of_tsc: Some(rate * work_ns / 1e9 / f64::from(cpus) * 100.0),
                document_percent: Some(share.document_percent),
                ..Row::default()
            });
        }
    }

    let mut notes = vec![format!(
        "model: parameters measured here: {} ns a read by one vCPU alone (p99/p50 {}), {} ns more \
         with a second vCPU, {} ns of it in this process, which the lock is taken to cover",
        figure(read_ns),
        figure(spread),
        figure(growth),
        figure(locked_ns)
    )];
    let error = |load: Load, measured: f64| (load.reads_per_s() / measured - 1.0) * 100.0;
    for n in 1..=most.min(2) {
        let mut errors: Vec<f64> = workload
            .iter()
            .filter(|w| w.cpus == n)
            .map(|w| {
                let load = Load { cpus: n, work_ns: w.tsc.ns_per_read(), ..free };
                error(load, w.exit.reads_per_s)
            })
            .collect();
        errors.extend(
            find(reads, Mode::Exit, n)
                .map(|best| error(Load { cpus: n, ..free }, best.reads_per_s)),
        );
        let shown: Vec<_> = errors.iter().map(|e| format!("{e:+.1} %")).collect();
        notes.push(format!(
            "model (nothing shared) against measurement with {n} vCPU(s), the four workloads, then \
             reads alone: {}",
            shown.join(", ")
        ));
    }
    (rows, notes)
}

fn table(rows: &[Row]) -> Vec<Vec<String>> {
    let header = [
        "part",
        "what",
        "vCPUs",
        "host",
        "reads/s",
        "ns/read",
        "p50",
        "p99",
        "backward",
        "% of TSC",
        "document %",
    ];
    let optional = |value: Option<f64>| value.map_or("-".into(), figure);
    let mut table = vec![header.map(str::to_owned).to_vec()];
    for row in rows {
        table.push(vec![
            row.part.into(),
            row.what.clone(),
            row.cpus.to_string(),
            row.host_kind.into(),
            figure(row.reads_per_s),
            optional(row.ns_per_read),
            optional(row.ns_p50),
            optional(row.ns_p99),
            row.backward.map_or("-".into(), |n| n.to_string()),
            optional(row.percent_of_tsc),
            optional(row.document_percent),
        ]);
    }
    table
}

/// The curves: reads per second over vCPUs.
fn plot(rows: &[Row]) -> Plot {
    let mut lines: Vec<Series> = Vec::new();
    for row in rows.iter().filter(|row| row.share_percent.is_none()) {
        let name = format!("{}: {}", row.part, row.what);
        let point = (f64::from(row.cpus), row.reads_per_s);
        match lines.iter_mut().find(|line| line.name == name) {
            Some(line) => line.points.push(point),
            None => lines.push(Series { name, points: vec![point] }),
        }
    }
    Plot {
        title: "Reads of one HPET by many vCPUs".into(),
        x: "vCPUs".into(),
        y: "reads per second, all vCPUs".into(),
        log_y: true,
        shape: Shape::Lines(lines),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn best(reads_per_s: f64, cpus: usize) -> Best {
        Best {
            reads_per_s,
            by_cpu: vec![reads_per_s / cpus as f64; cpus],
            ns_p50: 10.0,
            ns_p99: 20.0,
            backward: 0,
            reads: 1,
            work: 7,
            resolution_ns: None,
            handling_ns: Some(500.0),
            host_kind: "software",
        }
    }

    fn reads() -> Vec<(Trial, Best)> {
        let trial = |mode, cpus| Trial { mode, clock: "hpet", cpus, work: Work::None };
        vec![
            (trial(Mode::Floor, 1), best(41_000.0, 1)),
            (trial(Mode::Exit, 1), best(40_000.0, 1)),
            (trial(Mode::Exit, 2), best(78_000.0, 2)),
            (trial(Mode::Page, 1), best(200e6, 1)),
        ]
    }

    #[test]
    fn a_guests_line_becomes_rates_by_vcpu() {
        let console = r#"@result {"guest":"hpet-contention","cpus":2,"work":3,"reads":100,
            "reads_per_s":1000,"reads_each":[60,40],"backward":0,"ns_p50":5.00,"ns_p99":6.00}"#;
        let line = only_line(&console.replace('\n', "")).unwrap();
        let best = Best::of(&line, "software").unwrap();
        assert_eq!(best.by_cpu, [600.0, 400.0]);
        assert_eq!((best.work, best.reads, best.ns_per_read()), (3, 100, 2e6));
    }

    #[test]
    fn the_ratios_are_those_of_the_issue() {
        let notes = ratios(&reads(), 2).join("\n");
        for part in ["2 vCPUs together read 1.95x", "97.6 % of the bare loop", "5000x"] {
            assert!(notes.contains(part), "{part}: {notes}");
        }
    }

    #[test]
    fn a_lock_is_what_the_document_found_and_no_lock_is_not() {
        let workload = Workload {
            machine: "240 CPUs",
            share_bp: 3400,
            document_percent: 35.2,
            cpus: 1,
            tsc: best(1e9 / 48_500.0, 1),
            exit: best(1e9 / 73_500.0, 1),
            page: best(1e9 / 48_510.0, 1),
        };
        let (rows, notes) = model(&reads(), &[workload], 2, 240);
        let at_240 = |what: &str| {
            let found = rows.iter().find(|r| r.what == what && r.cpus == 240);
            found.unwrap_or_else(|| panic!("no {what}"))
        };
        let free = at_240("exit, nothing shared").reads_per_s;
        let locked = at_240("exit, one lock around each read").reads_per_s;
        assert!((free / 9_600_000.0 - 1.0).abs() < 0.02, "{free}");
        // 1 / 500 ns.
        assert!((locked / 2_000_000.0 - 1.0).abs() < 0.02, "{locked}");
        let percent =
            at_240("exit, one lock around each read, as 240 CPUs").percent_of_tsc.unwrap();
        assert!(percent < 60.0, "{percent}");
        assert_eq!(notes.len(), 3, "{notes:?}");
    }

    #[test]
    fn the_table_is_rectangular_and_the_plot_draws() {
        let rows: Vec<Row> = reads().iter().map(|(trial, best)| read_row(trial, best)).collect();
        let table = table(&rows);
        assert!(table.iter().all(|line| line.len() == table[0].len()));
        assert!(plot(&rows).to_svg().unwrap().contains("read: page"));
    }
}
