//! `clocklab bench`: `vmm` beside a peer VMM that boots the same image, and beside
//! the bare loop that does nothing but answer exits; runs alternate.

use super::start_up::rss_without;
use super::{Common, linux_start};
use crate::host::{Kind, label};
use crate::progress::Progress;
use crate::report::{Report, figure};
use crate::resources;
use crate::results::{self, Result as Line};
use crate::vm::{Guest, VmError, sibling};
use serde::Serialize;
use serde_json::json;
use std::collections::BTreeMap;
use std::io::{self, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;
use vmm::host::HostKind;

/// Limits that the project set itself.
const MOST_CPU_MS: f64 = 8.0;
const MOST_KIB: f64 = 5.0 * 1024.0;
const MOST_OVER_BARE: f64 = 1.05;
const MOST_OF_SETUP: f64 = 0.5;

const MEMORY_MIB: u64 = 128;
const PEER: &str = "qemu-system-x86_64";
const FIRST_BYTE: &str = "Linux to first console byte";

const METHOD: &str = "the contestants of a metric run in turn, --runs times each; p50, lowest and \
    highest of the runs, ratios of p50 and of lowest. Start: 128 MiB, 1 vCPU, a 32-bit Multiboot image whose first act is a \
    byte to COM1; wall time from spawn to that byte, the process's CPU time and its Rss beyond \
    guest RAM (/proc/PID/smaps) when it comes. Exits: p50 of batches of reads around which the \
    guest reads its TSC. Linux: one Debian kernel, initramfs and command line (256 MiB, 1 vCPU), \
    wall time from the VMM's start to the console's first byte and to /init's first line";

/// What to measure.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// Runs of each contestant
    #[arg(long, value_name = "N", default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..))]
    pub runs: u32,
    /// Runs of the peer's `pc` machine, whose firmware software KVM interprets for 20 s
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub pc_runs: u32,
    /// Linux boots by each of --boot payload and setup, and under the peer
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub linux_runs: u32,
}

/// All runs of one contestant in one metric.
#[derive(Debug, Clone, Serialize)]
struct Row {
    metric: &'static str,
    unit: &'static str,
    who: String,
    host_kind: &'static str,
    p50: f64,
    lowest: f64,
    highest: f64,
    runs: usize,
    /// Ours over this contestant's, for the contestants beside us: p50 by p50, and
    /// lowest by lowest, for what else runs on the host only adds.
    ours_over_this: Option<[f64; 2]>,
}

/// Samples by metric and contestant, in the order in which they first came.
#[derive(Debug, Default)]
struct Samples {
    order: Vec<(&'static str, &'static str, String, &'static str)>,
    values: BTreeMap<(&'static str, String), Vec<f64>>,
}

impl Samples {
    fn add(&mut self, metric: (&'static str, &'static str), who: &str, kind: Kind, value: f64) {
        let key = (metric.0, who.to_owned());
        if !self.values.contains_key(&key) {
            self.order.push((metric.0, metric.1, who.to_owned(), label(kind)));
        }
        self.values.entry(key).or_default().push(value);
    }

    /// Rows by metric; the first contestant of each is the one that others are compared with.
    fn rows(mut self) -> Vec<Row> {
        let mut metrics = Vec::new();
        for (metric, ..) in &self.order {
            if !metrics.contains(metric) {
                metrics.push(*metric);
            }
        }
        let mut rows: Vec<Row> = Vec::new();
        for metric in metrics {
            let mut ours = None;
            for (_, unit, who, host_kind) in self.order.iter().filter(|o| o.0 == metric) {
                let values = self.values.get_mut(&(metric, who.clone()));
                let values = values.map(std::mem::take).unwrap_or_default();
                let row = row(metric, unit, who, host_kind, values, ours);
                ours = ours.or(Some([row.p50, row.lowest]));
                rows.push(row);
            }
        }
        rows
    }
}

fn row(
    metric: &'static str,
    unit: &'static str,
    who: &str,
    host_kind: &'static str,
    mut values: Vec<f64>,
    ours: Option<[f64; 2]>,
) -> Row {
    values.sort_by(f64::total_cmp);
    let (p50, lowest) = (values[values.len() / 2], values[0]);
    Row {
        metric,
        unit,
        who: who.to_owned(),
        host_kind,
        p50,
        lowest,
        highest: values[values.len() - 1],
        runs: values.len(),
        ours_over_this: ours.map(|ours| [ours[0] / p50, ours[1] / lowest]),
    }
}

/// Runs the benchmark.
///
/// # Errors
/// A guest that does not run; no /dev/kvm.
pub fn run(common: &Common, options: &Options) -> Result<Report, VmError> {
    let mut samples = Samples::default();
    let mut notes = start(options, &mut samples)?;
    exits(options, &mut samples)?;
    linux(common, options, &mut samples)?;
    let rows = samples.rows();
    notes.extend(verdicts(&rows));
    Ok(report(&rows, notes))
}

/// The contestants that boot a Multiboot image, each with its command.
fn contestants(image: &Path) -> Result<Vec<(&'static str, Command)>, VmError> {
    let mut ours = Command::new(sibling("vmm")?);
    ours.args(["--memory", &format!("{MEMORY_MIB}M"), "--debug-exit", "--cmdline"]);
    ours.arg("reads=200 batches=5").arg("--kernel").arg(image);
    let mut all = vec![("vmm", ours)];
    let found = Command::new(PEER).arg("--version").stdout(Stdio::null()).status();
    if found.is_ok_and(|status| status.success()) {
        for (name, machine) in [
            ("QEMU microvm", "microvm,accel=kvm,rtc=on,isa-serial=on"),
            ("QEMU pc", "pc,accel=kvm"),
        ] {
            let mut peer = Command::new(PEER);
            // Software KVM refuses the MSR of arch-capabilities.
            peer.args(["-M", machine, "-cpu", "host,-arch-capabilities"])
                .args(["-m", &MEMORY_MIB.to_string(), "-nodefaults", "-no-user-config"])
                .args(["-display", "none", "-no-reboot", "-serial", "stdio"])
                .args(["-device", "isa-debug-exit,iobase=0xf4,iosize=4"])
                .args(["-append", "reads=200 batches=5", "-kernel"])
                .arg(image);
            all.push((name, peer));
        }
    }
    Ok(all)
}

/// From the start of a process to its guest's first byte, and what exits cost there.
fn start(options: &Options, samples: &mut Samples) -> Result<Vec<String>, VmError> {
    let mut progress = Progress::new(true);
    let image = resources::program(&mut progress, "guest32-clock-cost")?;
    let mut contestants = contestants(&image)?;
    let kind = Kind::Direct(HostKind::detect());
    for round in 0..options.runs {
        for (who, command) in &mut contestants {
            if *who == "QEMU pc" && round >= options.pc_runs {
                continue;
            }
            progress.next(&format!("run {} of {}: {who}", round + 1, options.runs));
            let failed = |e| VmError::Host((*who).to_owned(), e);
            let begun = begin(command).map_err(failed)?;
            let mut add = |metric, value| samples.add(metric, who, kind, value);
            add(("start to first byte, wall", "ms"), begun.wall_ms);
            add(("start to first byte, CPU", "ms"), begun.cpu_ms);
            add(("Rss beyond guest RAM", "KiB"), begun.rss_kib);
            for line in results::parse(&begun.console) {
                let metric = match results::text(&line, "clock") {
                    Some("pio") => ("port read (COM1 LSR), ring 0", "cycles"),
                    Some("hpet") => ("HPET counter read, ring 0", "cycles"),
                    _ => continue,
                };
                if let Some(cycles) = results::number(&line, "cycles_p50") {
                    add(metric, cycles);
                }
            }
        }
    }
    Ok(match contestants.len() {
        1 => vec![format!("no peer: {PEER} is not installed")],
        _ => vec!["QEMU's times include its firmware, which vmm does without".into()],
    })
}

/// A process at its guest's first byte, and what the guest then said.
struct Begun {
    wall_ms: f64,
    cpu_ms: f64,
    rss_kib: f64,
    console: String,
}

fn begin(command: &mut Command) -> io::Result<Begun> {
    let started = Instant::now();
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
    let measured = at_first_byte(&mut child, started);
    if measured.is_err() {
        // Gone already where it failed to start.
        let _ = child.kill();
    }
    child.wait()?;
    measured
}

fn at_first_byte(child: &mut Child, started: Instant) -> io::Result<Begun> {
    let mut console = child.stdout.take().ok_or_else(|| io::Error::other("no pipe"))?;
    console.read_exact(&mut [0])?;
    let wall_ms = started.elapsed().as_secs_f64() * 1e3;
    let cpu_ms = cpu_ms(child)?;
    let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", child.id()))?;
    let rss_kib = rss_without(&smaps, MEMORY_MIB * 1024)
        .ok_or_else(|| io::Error::other("smaps shows no mapping of the guest's memory"))?;
    let mut text = String::new();
    console.read_to_string(&mut text)?;
    Ok(Begun { wall_ms, cpu_ms, rss_kib: rss_kib as f64, console: text })
}

/// CPU time of all threads so far, user and system.
fn cpu_ms(child: &Child) -> io::Result<f64> {
    let mut clock = 0;
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: both calls fill the variable that they are given and keep no pointer.
    let outcome = unsafe {
        match libc::clock_getcpuclockid(child.id() as libc::pid_t, &raw mut clock) {
            0 => libc::clock_gettime(clock, &raw mut time),
            error => return Err(io::Error::from_raw_os_error(error)),
        }
    };
    if outcome != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(time.tv_sec as f64 * 1e3 + time.tv_nsec as f64 / 1e6)
}

/// Exits of 64-bit guests, beside the bare loop.
fn exits(options: &Options, samples: &mut Samples) -> Result<(), VmError> {
    const COSTS: &[&str] = &["reads=200 batches=5 pairs=1"];
    const RATE: &[&str] = &["clock=hpet ms=300"];
    let kind = Kind::Direct(HostKind::detect());
    let mut progress = Progress::new(true);
    for round in 0..options.runs {
        progress.next(&format!("run {} of {}: exits", round + 1, options.runs));
        for (who, program, flags) in
            [("vmm", "vmm", &["--hv-tsc-page"][..]), ("bare loop", "bare-loop", &[])]
        {
            let lines = guest_lines(program, "guest-clock-cost", "1", COSTS, flags)?;
            for line in &lines {
                let place = results::text(line, "where");
                let metric = match (results::text(line, "clock"), place) {
                    (Some("msr"), _) => ("RDMSR of the counter, ring 0", "cycles"),
                    (Some("hpet"), Some("guest-kernel")) => ("HPET read, ring 0", "cycles"),
                    (Some("hpet"), _) => ("HPET read, ring 3", "cycles"),
                    (Some("acpi_pm"), _) => ("port read (PM timer), ring 3", "cycles"),
                    _ => continue,
                };
                if let Some(cycles) = results::number(line, "cycles_p50") {
                    samples.add(metric, who, kind, cycles);
                }
            }
            for (cpus, metric) in [("1", "HPET reads, 1 vCPU"), ("2", "HPET reads, 2 vCPUs")] {
                let lines = guest_lines(program, "guest-hpet-contention", cpus, RATE, flags)?;
                if let Some(rate) = lines.iter().find_map(|l| results::number(l, "reads_per_s")) {
                    samples.add((metric, "per s"), who, kind, rate);
                }
            }
        }
    }
    Ok(())
}

/// What a guest said under one of our two programs.
fn guest_lines(
    program: &str,
    guest: &str,
    cpus: &str,
    words: &[&str],
    flags: &[&str],
) -> Result<Vec<Line>, VmError> {
    let failed = |e| VmError::Host(program.to_owned(), e);
    let output = Command::new(sibling(program)?)
        .arg("--kernel")
        .arg(sibling(guest)?)
        .args(["--cpus", cpus, "--cmdline", &words.join(" ")])
        .args(flags)
        .stdin(Stdio::null())
        .output()
        .map_err(failed)?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).trim_end().to_owned();
        return Err(failed(io::Error::other(format!("{guest}: {}: {said}", output.status))));
    }
    Ok(results::parse(&String::from_utf8_lossy(&output.stdout)))
}

/// Linux by its own unpacking and by ours, and under the peer.
fn linux(common: &Common, options: &Options, samples: &mut Samples) -> Result<(), VmError> {
    if options.linux_runs == 0 {
        return Ok(());
    }
    let in_lab = common.lab.in_lab(Guest::Linux);
    let contestants = linux_start::contestants(in_lab, &common.vmm_arg, PEER)?;
    for _ in 0..options.linux_runs {
        for contestant in &contestants {
            let times = contestant.run()?;
            let mut add = |metric, ms| samples.add(metric, contestant.who, contestant.kind(), ms);
            add((FIRST_BYTE, "ms"), times.first_byte_ms);
            add(("Linux to /init's first line", "ms"), times.init_ms);
        }
    }
    Ok(())
}

/// What the limits say of the rows.
fn verdicts(rows: &[Row]) -> Vec<String> {
    let mut notes = Vec::new();
    let mut judge = |what: String, holds: bool| {
        notes.push(format!("{what}: {}", if holds { "holds" } else { "FAILS" }));
    };
    for row in rows {
        let Row { metric, p50, .. } = row;
        match (row.who.as_str(), *metric) {
            ("vmm", "start to first byte, CPU") => judge(
                format!("{} ms of CPU time to the first byte, at most {MOST_CPU_MS}", figure(*p50)),
                *p50 <= MOST_CPU_MS,
            ),
            ("vmm", "Rss beyond guest RAM") => {
                judge(format!("{p50} KiB beyond guest RAM, at most {MOST_KIB}"), *p50 <= MOST_KIB);
            }
            (who, metric) if who.starts_with("QEMU") && row.unit != "cycles" => {
                if let Some([ratio, _]) = row.ours_over_this {
                    judge(format!("{metric}: {} of {who}'s", figure(ratio)), ratio <= 1.0);
                }
            }
            ("bare loop", metric) if row.unit == "cycles" => {
                if let Some([_, ratio]) = row.ours_over_this {
                    let what = format!("{metric}: {ratio:.3} of the bare loop's (lowest), at most");
                    judge(format!("{what} {MOST_OVER_BARE}"), ratio <= MOST_OVER_BARE);
                }
            }
            ("vmm --boot setup", FIRST_BYTE) => {
                // The first contestant is payload: ours is what it took.
                if let Some([ratio, _]) = row.ours_over_this {
                    let what = format!("payload boot's first byte in {} of setup's", figure(ratio));
                    judge(format!("{what}, at most {MOST_OF_SETUP}"), ratio <= MOST_OF_SETUP);
                }
            }
            _ => {}
        }
    }
    notes
}

fn report(rows: &[Row], notes: Vec<String>) -> Report {
    let mut report = Report::new("bench", METHOD);
    report.rows = rows.iter().map(|row| json!(row)).collect();
    report.document = json!({
        "most_cpu_ms": MOST_CPU_MS,
        "most_kib": MOST_KIB,
        "most_over_bare": MOST_OVER_BARE,
        "most_of_setup": MOST_OF_SETUP,
    });
    let header = [
        "metric",
        "who",
        "host",
        "unit",
        "p50",
        "lowest",
        "highest",
        "runs",
        "ours/this",
        "of lowest",
    ];
    report.table = vec![header.map(str::to_owned).to_vec()];
    for row in rows {
        let ratio = |n: usize| row.ours_over_this.map_or("-".into(), |r| format!("{:.3}", r[n]));
        report.table.push(vec![
            row.metric.into(),
            row.who.clone(),
            row.host_kind.into(),
            row.unit.into(),
            figure(row.p50),
            figure(row.lowest),
            figure(row.highest),
            row.runs.to_string(),
            ratio(0),
            ratio(1),
        ]);
    }
    report.notes = notes;
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_are_compared_with_the_first_by_the_median() {
        let mut samples = Samples::default();
        let kind = Kind::Direct(HostKind::Software);
        for (ours, theirs) in [(1.0, 4.0), (3.0, 6.0), (2.0, 5.0)] {
            samples.add(("start to first byte, CPU", "ms"), "vmm", kind, ours);
            samples.add(("start to first byte, CPU", "ms"), "QEMU pc", kind, theirs);
        }
        let rows = samples.rows();
        assert_eq!((rows[0].p50, rows[0].lowest, rows[0].highest), (2.0, 1.0, 3.0));
        assert_eq!((rows[0].ours_over_this, rows[1].ours_over_this), (None, Some([0.4, 0.25])));
        let notes = verdicts(&rows);
        assert!(notes[0].ends_with("at most 8: holds"), "{notes:?}");
        assert!(notes[1].ends_with("of QEMU pc's: holds"), "{notes:?}");
    }

    #[test]
    fn a_limit_can_be_missed() {
        let mut samples = Samples::default();
        let kind = Kind::Direct(HostKind::Hardware);
        samples.add(("HPET read, ring 0", "cycles"), "vmm", kind, 106.0);
        samples.add(("HPET read, ring 0", "cycles"), "bare loop", kind, 100.0);
        assert!(verdicts(&samples.rows())[0].ends_with("FAILS"));
    }
}
