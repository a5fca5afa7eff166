//! `clocklab clock-cost`: what one read of each clock costs. The document is
//! the kernel's patch thread on a Hyper-V sched clock for 32-bit guests, 2019.
//!
//! Kernel method: ordered RDTSC, 1000 × read, ordered RDTSC, divide; user method:
//! RDTSC, COUNT × clock_gettime(CLOCK_REALTIME), RDTSC, divide.

use super::{Common, linux_files, run_all};
use crate::host::label;
use crate::progress::Progress;
use crate::report::{Plot, Report, Shape, figure};
use crate::resources;
use crate::results::{self, Result as Line};
use crate::vm::{Outcome, Vm, VmError, linux32_files};
use serde::Serialize;
use serde_json::{Value, json};

/// The document's figures, in cycles.
const DOCUMENT: [(&str, f64, f64); 2] = [("msr", 3361.0, 5664.0), ("page", 49.0, 131.0)];

const METHOD: &str = "guest-kernel: ordered RDTSC, N reads, ordered RDTSC, divide; guest-user: the \
    same around N clock_gettime(CLOCK_REALTIME), or around N reads of the page or register in \
    ring 3 for bare-metal guests (kernel column of the page: ring 3, same instructions); p50, min \
    and max over batches of N reads";

/// Word sizes of guests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Word {
    /// 64-bit guests.
    Amd64,
    /// These, and 32-bit guests beside them.
    I386,
}

/// What to measure.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// Which guests: i386 adds 32-bit ones to the table
    #[arg(long, value_name = "ARCH", value_enum, default_value_t = Word::Amd64)]
    pub guest: Word,
}

/// One measured clock.
#[derive(Debug, Clone, Serialize)]
struct Row {
    clock: String,
    guest: &'static str,
    #[serde(rename = "where")]
    place: String,
    host_kind: &'static str,
    cycles_p50: f64,
    cycles_min: f64,
    cycles_max: f64,
    ns_p50: Option<f64>,
    exits_per_read: Option<f64>,
    samples: u64,
}

/// Runs the experiment.
///
/// # Errors
/// A guest that does not run, or runs on another clock than it should.
pub fn run(common: &Common, options: &Options) -> Result<Report, VmError> {
    let mut bare = common.bare("guest-clock-cost", &["--cpus", "2", "--hv-tsc-page"])?;
    let files = linux_files()?;
    const JOBS: &str = "clocksource,dmesg,clock-cost,poweroff";
    let linux = |name, flag| common.linux(name, JOBS, &files, &["--cpus", "2", flag]);
    let page = linux("Linux with the TSC page", "--hv-tsc-page");
    let counter = linux("Linux with the counter alone", "--hv-ref-counter");

    // Word sizes are compared on one host.
    bare.in_lab |= options.guest == Word::I386 && page.in_lab;

    let bare_ran = bare.run_to_poweroff()?;
    let linux_ran = run_all(&[page.clone(), counter.clone()])?;
    let [page_ran, counter_ran] = &linux_ran[..] else { unreachable!("one outcome a VM") };
    expect_clocksource(&page, page_ran, "hyperv_clocksource_tsc_page")?;
    expect_clocksource(&counter, counter_ran, "hyperv_clocksource_msr")?;

    let mut rows = rows("bare metal", &bare_ran);
    rows.extend(self::rows("Linux", page_ran));
    let msr = |row: &Row| row.clock == "hyperv_clocksource_msr";
    rows.extend(self::rows("Linux", counter_ran).into_iter().filter(msr));
    let narrow = match options.guest {
        Word::Amd64 => None,
        Word::I386 => Some(run_narrow(common, &mut rows)?),
    };
    let mut report = report(&rows);
    report.notes.extend(narrow);
    report.notes.extend(defects(page_ran));
    report.notes.push(page_quietness(page_ran));
    Ok(report)
}

/// Runs the 32-bit guests and adds their rows; returns what must be said of them.
///
/// The kernel's reads are measured in a bare 32-bit kernel of our own, by the code
/// that Linux would use, because nothing of ours can be built into Debian's.
fn run_narrow(common: &Common, rows: &mut Vec<Row>) -> Result<String, VmError> {
    let mut progress = Progress::new(true);
    let image = resources::program(&mut progress, "guest32-clock-cost")?;
    let files = linux32_files(&mut progress)?;
    let linux = |name, flag| common.linux32(name, &files, &["--cpus", "2", flag]);
    let page = linux("32-bit Linux with the TSC page", "--hv-tsc-page");
    let counter = linux("32-bit Linux with the counter alone", "--hv-ref-counter");
    let mut bare = page.clone();
    bare.name = "32-bit bare kernel".into();
    bare.files = vec![("guest32".into(), image)];
    bare.arguments = ["--kernel", "guest32", "--hv-tsc-page", "--cmdline", "reads=200"]
        .map(str::to_owned)
        .to_vec();
    bare.arguments.extend(common.vmm_arg.iter().cloned());

    let ran = run_all(&[page.clone(), counter.clone(), bare])?;
    let [page_ran, counter_ran, bare_ran] = &ran[..] else { unreachable!("one outcome a VM") };
    expect_clocksource(&page, page_ran, "hyperv_clocksource_tsc_page")?;
    expect_clocksource(&counter, counter_ran, "hyperv_clocksource_msr")?;
    rows.extend(self::rows("bare metal i386", bare_ran));
    rows.extend(self::rows("Linux i386", page_ran));
    let msr = |row: &Row| row.clock == "hyperv_clocksource_msr";
    rows.extend(self::rows("Linux i386", counter_ran).into_iter().filter(msr));
    Ok("a 32-bit Linux guest chose hyperv_clocksource_tsc_page by itself; the kernel rows of i386 \
        are of a bare 32-bit kernel with Linux's arithmetic; a lab of theirs shadows page tables"
        .into())
}

/// The guest must have chosen this clock by itself.
fn expect_clocksource(vm: &Vm, ran: &Outcome, name: &str) -> Result<(), VmError> {
    let lines = results::parse(&ran.console);
    let current = results::select(&lines, "job", "clocksource")
        .find_map(|line| results::text(line, "current"))
        .unwrap_or("none that it told of");
    if current == name {
        return Ok(());
    }
    Err(vm.unexpected(ran, format!("the guest's clocksource is {current}, not {name}")))
}

/// Reduces a guest's `clock-cost` lines.
fn rows(guest: &'static str, ran: &Outcome) -> Vec<Row> {
    let lines = results::parse(&ran.console);
    let costs = lines.iter().filter(|line| line.contains_key("cycles_p50"));
    costs.filter_map(|line| row(guest, line, ran)).collect()
}

fn row(guest: &'static str, line: &Line, ran: &Outcome) -> Option<Row> {
    let number = |key| results::number(line, key);
    Some(Row {
        clock: results::text(line, "clock")?.to_owned(),
        guest,
        place: results::text(line, "where")?.to_owned(),
        host_kind: label(ran.kind),
        cycles_p50: number("cycles_p50")?,
        cycles_min: number("cycles_min")?,
        cycles_max: number("cycles_max")?,
        ns_p50: number("ns_p50"),
        exits_per_read: exits_per_read(line, &ran.stats),
        samples: number("samples").or(number("batches"))? as u64,
    })
}

/// Exits between a measurement's two marks, over its reads.
fn exits_per_read(line: &Line, stats: &Value) -> Option<f64> {
    let first = results::number(line, "first_mark")? as u64;
    let exits = exits_between(stats, first, first + 1)?;
    Some(exits as f64 / results::number(line, "reads")?)
}

/// Exits from the guest's mark `first` to its mark `last`, without those of the
/// marks and of signals that took a vCPU out.
fn exits_between(stats: &Value, first: u64, last: u64) -> Option<u64> {
    let total_at = |number: u64| {
        let name = format!("guest {number}");
        let mark = stats["marks"].as_array()?.iter().find(|mark| mark["name"] == name.as_str())?;
        let reasons = mark["exits"].as_object()?;
        Some(
            reasons
                .iter()
                .filter(|(reason, _)| *reason != "interrupted")
                .filter_map(|(_, count)| count.as_u64())
                .sum::<u64>(),
        )
    };
    // The first mark is counted after its note was taken.
    total_at(last)?.checked_sub(total_at(first)? + 1)
}

/// What the guest's kernel complained of, as notes.
fn defects(ran: &Outcome) -> Vec<String> {
    let lines = results::parse(&ran.console);
    results::select(&lines, "job", "dmesg")
        .filter_map(|line| Some((results::text(line, "defect")?, results::text(line, "text")?)))
        .map(|(defect, text)| format!("the guest's kernel says \"{defect}\": {text}"))
        .collect()
}

/// What the statistics say of the page: set up once, and no counter read for it.
fn page_quietness(ran: &Outcome) -> String {
    let msrs = ran.stats["exits"]["msrs"].as_array().cloned().unwrap_or_default();
    let count = |msr: &str, direction: &str| {
        msrs.iter()
            .find(|row| row["name"] == msr)
            .and_then(|row| row[direction]["count"].as_u64())
            .unwrap_or(0)
    };
    format!(
        "Linux with the page wrote MSR 0x40000021 {} time(s) and read MSR 0x40000020 {} time(s) in \
         its whole life",
        count("0x40000021", "writes"),
        count("0x40000020", "reads")
    )
}

/// The cheapest measurement of a clock: its p50 by guest and place.
fn cycles(rows: &[Row], guest: &str, place: &str, clocks: &[&str]) -> Option<f64> {
    rows.iter()
        .find(|r| r.guest == guest && r.place == place && clocks.contains(&r.clock.as_str()))
        .map(|r| r.cycles_p50)
}

fn report(rows: &[Row]) -> Report {
    const PAGE: &[&str] = &["page", "hyperv_clocksource_tsc_page"];
    const MSR: &[&str] = &["msr", "hyperv_clocksource_msr"];
    let mut report = Report::new("clock-cost", METHOD);
    report.rows = rows.iter().map(|row| json!(row)).collect();
    let ratio = |msr: Option<f64>, page: Option<f64>| Some(msr? / page?);
    let bare = ratio(
        cycles(rows, "bare metal", "guest-kernel", MSR),
        cycles(rows, "bare metal", "guest-user", PAGE),
    );
    let linux =
        ratio(cycles(rows, "Linux", "guest-user", MSR), cycles(rows, "Linux", "guest-user", PAGE));
    report.document = json!({
        "cycles": DOCUMENT.map(|(clock, kernel, user)| json!({"clock": clock, "kernel": kernel, "user": user})),
        "ratio_kernel": DOCUMENT[0].1 / DOCUMENT[1].1,
        "ratio_user": DOCUMENT[0].2 / DOCUMENT[1].2,
        "our_ratio_kernel": bare,
        "our_ratio_user": linux,
    });

    let header = [
        "guest",
        "clock",
        "where",
        "host",
        "cycles p50",
        "min",
        "max",
        "ns p50",
        "exits/read",
        "samples",
    ];
    report.table = vec![header.map(str::to_owned).to_vec()];
    let optional = |value: Option<f64>| value.map_or("-".into(), figure);
    for row in rows {
        report.table.push(vec![
            row.guest.into(),
            row.clock.clone(),
            row.place.clone(),
            row.host_kind.into(),
            figure(row.cycles_p50),
            figure(row.cycles_min),
            figure(row.cycles_max),
            optional(row.ns_p50),
            optional(row.exits_per_read),
            row.samples.to_string(),
        ]);
    }
    for (clock, kernel, user) in DOCUMENT {
        for (place, cycles) in [("guest-kernel", kernel), ("guest-user", user)] {
            let mut line = vec!["document".into(), clock.into(), place.into(), "Hyper-V".into()];
            line.push(figure(cycles));
            line.resize(header.len(), "-".into());
            report.table.push(line);
        }
    }
    let mut say = |what: &str, ours: Option<f64>, document: f64| {
        if let Some(ours) = ours {
            report.notes.push(format!(
                "{what}: the MSR costs {}x the page (the document: {document:.1}x)",
                figure(ours)
            ));
        }
    };
    say("bare metal", bare, DOCUMENT[0].1 / DOCUMENT[1].1);
    say("Linux user", linux, DOCUMENT[0].2 / DOCUMENT[1].2);
    let narrow = |guest: &str, place: &str| {
        ratio(cycles(rows, guest, place, MSR), cycles(rows, guest, place, PAGE))
    };
    let (kernel, user) =
        (narrow("bare metal i386", "guest-kernel"), narrow("Linux i386", "guest-user"));
    say("i386 kernel", kernel, DOCUMENT[0].1 / DOCUMENT[1].1);
    say("i386 Linux user", user, DOCUMENT[0].2 / DOCUMENT[1].2);
    report.plot = Some(Plot {
        title: "Cost of one clock read".into(),
        x: "clock (K: guest kernel, U: guest user)".into(),
        y: "cycles, p50".into(),
        log_y: true,
        shape: Shape::Bars(rows.iter().map(bar).collect()),
    });
    report
}

fn bar(row: &Row) -> (String, f64) {
    let clock = row.clock.trim_start_matches("hyperv_clocksource_");
    let place = if row.place == "guest-kernel" { "K" } else { "U" };
    let guest = row.guest.trim_start_matches("bare metal").trim_start();
    (format!("{guest} {clock} {place}").trim_start().to_owned(), row.cycles_p50)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exits_are_counted_between_marks() {
        let stats = json!({"marks": [
            {"name": "memory", "ns": 1},
            {"name": "guest 0", "ns": 2, "exits": {"msr_read": 10, "port_write": 5, "interrupted": 3}},
            {"name": "guest 1", "ns": 3, "exits": {"msr_read": 110, "port_write": 6, "interrupted": 9}},
        ]});
        assert_eq!(exits_between(&stats, 0, 1), Some(100));
        assert_eq!(exits_between(&stats, 0, 2), None);
    }
}
