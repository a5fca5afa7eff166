//! `clocklab timer-latency`: how late a timer's handler runs, by who serves the
//! timer. The document is the kernel's patch thread on housekeeping CPUs, 2019.
//!
//! A bare-metal guest arms one deadline after the other and compares the TSC at the
//! first instruction of the handler with the deadline.

use super::Common;
use crate::host::label;
use crate::report::{Plot, Report, Series, Shape, figure};
use crate::results::{self, Result as Line};
use crate::vm::{Outcome, Vm, VmError};
use hdrhistogram::Histogram;
use serde::Serialize;
use serde_json::json;
use std::sync::atomic::{AtomicBool, Ordering};
use vmm::pinning::{self, Place};

const METHOD: &str = "the guest arms deadlines at random 50 us-10 ms ahead, sleeps in HLT, and \
    subtracts each from the TSC at its handler's first instruction; vCPU and housekeeping thread \
    each on its own CPU where there are two; all configurations run one after the other, in \
    several rounds whose histograms are merged; p99 by round shows what the host's own load does";

/// What to run, and how often.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// Deadlines of each configuration in each round
    #[arg(long, value_name = "N", default_value_t = 200)]
    pub timers: u32,
    /// Rounds
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub rounds: u32,
}

/// Who serves the timer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Server {
    Kernel,
    Offload,
    Stimer,
}

impl Server {
    fn name(self) -> &'static str {
        match self {
            Server::Kernel => "kernel",
            Server::Offload => "offload",
            Server::Stimer => "stimer",
        }
    }

    fn arguments(self) -> &'static [&'static str] {
        match self {
            Server::Kernel => &["--hv-tsc-page", "--lapic-timer", "kernel"],
            Server::Offload => &["--hv-tsc-page", "--lapic-timer", "offload"],
            Server::Stimer => &["--hv-stimer"],
        }
    }

    fn guest_mode(self) -> &'static str {
        if self == Server::Stimer { "stimer" } else { "lapic-deadline" }
    }

    /// The MSR by which a timer is armed, where that comes to us.
    fn arming_msr(self) -> Option<&'static str> {
        match self {
            Server::Kernel => None,
            Server::Offload => Some("0x6e0"),
            Server::Stimer => Some("0x400000b1"),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Config {
    server: Server,
    poll_us: u32,
    busy: bool,
}

/// All that is compared, the plain ones first.
fn configs(with_competitor: bool) -> Vec<Config> {
    let polls = [
        (Server::Kernel, &[0][..]),
        (Server::Offload, &[0, 10, 50]),
        (Server::Stimer, &[0, 10, 50]),
    ];
    let load: &[bool] = if with_competitor { &[false, true] } else { &[false] };
    let mut all = Vec::new();
    for &busy in load {
        for (server, polls) in polls {
            all.extend(polls.iter().map(|&poll_us| Config { server, poll_us, busy }));
        }
    }
    all
}

/// What the rounds of one configuration came to.
struct Sum {
    lateness_ns: Histogram<u64>,
    p99_by_round: Vec<u64>,
    armed: u64,
    early: u64,
    lost: u64,
    extra: u64,
    arming_exits: u64,
    other_exits: u64,
    wakeups: u64,
    host_kind: &'static str,
}

/// A row of the report.
#[derive(Debug, Clone, Serialize)]
struct Row {
    server: Server,
    poll_us: u32,
    competitor: bool,
    host_kind: &'static str,
    armed: u64,
    early: u64,
    lost: u64,
    extra: u64,
    ns_p50: u64,
    ns_p99: u64,
    ns_p999: u64,
    ns_max: u64,
    ns_p99_by_round: Vec<u64>,
    arming_exits_per_timer: f64,
    other_exits: u64,
    housekeeping_wakeups_per_timer: f64,
}

/// Runs the experiment.
///
/// # Errors
/// A guest that does not run, or that says what cannot be.
pub fn run(common: &Common, options: &Options) -> Result<Report, VmError> {
    let probe = vm(common, options, Config { server: Server::Kernel, poll_us: 0, busy: false })?;
    // A competitor of ours does not reach into the lab's one CPU.
    let configs = configs(!probe.in_lab);
    let mut sums: Vec<Option<Sum>> = configs.iter().map(|_| None).collect();
    let mut refusals = Vec::new();
    for _ in 0..options.rounds.max(1) {
        for (config, sum) in configs.iter().zip(&mut sums) {
            let vm = vm(common, options, *config)?;
            let ran = {
                let _competitor = config.busy.then(Competitor::start);
                vm.run()?
            };
            if ran.status == 35 && config.server == Server::Offload {
                refusals.push(ran.stderr.trim().to_owned());
                continue;
            }
            let wrong = |what: &str| vm.unexpected(&ran, what.to_owned());
            if ran.status != 0 {
                return Err(wrong("vmm did not end with 0"));
            }
            let lines = results::parse(&ran.console);
            let line = lines.iter().find(|line| line.contains_key("histogram_ns"));
            let line = line.ok_or_else(|| wrong("no result of the timer guest"))?;
            add(sum, config.server, line, &ran).ok_or_else(|| wrong("an incomplete result"))?;
        }
    }
    let rows: Vec<Row> = configs
        .iter()
        .zip(&sums)
        .filter_map(|(config, sum)| Some(row(*config, sum.as_ref()?)))
        .collect();
    let mut report = report(&rows, &sums, &configs);
    refusals.dedup();
    report.notes.extend(refusals);
    Ok(report)
}

fn vm(common: &Common, options: &Options, config: Config) -> Result<Vm, VmError> {
    let cmdline = format!(
        "mode={} wait=halt count={} min_us=50 max_us=10000",
        config.server.guest_mode(),
        options.timers
    );
    let poll = config.poll_us.to_string();
    let mut arguments = config.server.arguments().to_vec();
    arguments.extend(["--hk-poll", &poll, "--cmdline", &cmdline]);
    let (own, keeper) = (own_cpu().to_string(), pinning::allowed_cpus().0.first().copied());
    let keeper = keeper.unwrap_or(0).to_string();
    let mut vm = common.bare("guest-timer", &arguments)?;
    if !vm.in_lab {
        vm.arguments.extend(["--pin", &own, "--housekeeping", &keeper].map(str::to_owned));
    }
    let load = if config.busy { ", busy" } else { "" };
    vm.name = format!("{}, {} us of polling{load}", config.server.name(), config.poll_us);
    Ok(vm)
}

/// The vCPU's CPU: the last one we may use.
fn own_cpu() -> u32 {
    pinning::allowed_cpus().0.last().copied().unwrap_or(0)
}

/// A thread that never sleeps, on the vCPU's CPU; stopped when dropped.
struct Competitor {
    stop: std::sync::Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Competitor {
    fn start() -> Self {
        let stop = std::sync::Arc::new(AtomicBool::new(false));
        let told = stop.clone();
        let thread = std::thread::spawn(move || {
            // Elsewhere it competes less, and the row shows it.
            let _ = Place { cpu: Some(own_cpu()), rt_priority: None }.take("the competitor");
            while !told.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        Self { stop, thread: Some(thread) }
    }
}

impl Drop for Competitor {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(std::thread::JoinHandle::join);
    }
}

/// Adds one run to its configuration's sum.
fn add(sum: &mut Option<Sum>, server: Server, line: &Line, ran: &Outcome) -> Option<()> {
    let count = |key| results::number(line, key).map(|n| n as u64);
    let sum = sum.get_or_insert_with(|| Sum {
        lateness_ns: Histogram::new(3).expect("3 digits are allowed"),
        p99_by_round: Vec::new(),
        armed: 0,
        early: 0,
        lost: 0,
        extra: 0,
        arming_exits: 0,
        other_exits: 0,
        wakeups: 0,
        host_kind: label(ran.kind),
    });
    // The guest's buckets are at most 12.5 % wide; a value counts as its bucket's start.
    for pair in line.get("histogram_ns")?.as_array()? {
        sum.lateness_ns.record_n(pair.get(0)?.as_u64()?, pair.get(1)?.as_u64()?).ok()?;
    }
    sum.p99_by_round.push(count("ns_p99")?);
    sum.armed += count("armed")?;
    sum.early += count("early")?;
    sum.lost += count("lost")?;
    sum.extra += count("extra")?;
    let exits = &ran.stats["exits"];
    let rows = exits["msrs"].as_array()?;
    let arming = server.arming_msr().map_or(0, |msr| {
        let row = rows.iter().find(|row| row["name"] == msr);
        row.map_or(0, |row| row["writes"]["count"].as_u64().unwrap_or(0))
    });
    sum.arming_exits += arming;
    let all: u64 = exits["reasons"]
        .as_object()?
        .iter()
        .filter(|(reason, _)| !reason.starts_with("port"))
        .filter_map(|(_, tally)| tally["count"].as_u64())
        .sum();
    sum.other_exits += all - arming;
    let threads = ran.stats["housekeeping"].as_array()?;
    sum.wakeups += threads.iter().filter_map(|t| t["wakeups"].as_u64()).sum::<u64>();
    Some(())
}

fn row(config: Config, sum: &Sum) -> Row {
    let Config { server, poll_us, busy: competitor } = config;
    let quantile = |q| sum.lateness_ns.value_at_quantile(q);
    let per_timer = |n: u64| n as f64 / sum.armed.max(1) as f64;
    Row {
        server,
        poll_us,
        competitor,
        host_kind: sum.host_kind,
        armed: sum.armed,
        early: sum.early,
        lost: sum.lost,
        extra: sum.extra,
        ns_p50: quantile(0.5),
        ns_p99: quantile(0.99),
        ns_p999: quantile(0.999),
        ns_max: sum.lateness_ns.max(),
        ns_p99_by_round: sum.p99_by_round.clone(),
        arming_exits_per_timer: per_timer(sum.arming_exits),
        other_exits: sum.other_exits,
        housekeeping_wakeups_per_timer: per_timer(sum.wakeups),
    }
}

fn report(rows: &[Row], sums: &[Option<Sum>], configs: &[Config]) -> Report {
    let mut report = Report::new("timer-latency", METHOD);
    report.rows = rows.iter().map(|row| json!(row)).collect();
    report.document = json!({
        "cyclictest_us": {"offloaded to housekeeping CPUs": "4-5", "without": 8},
        "housekeeper_search_ns": 43_460,
    });
    let header = [
        "served by",
        "poll us",
        "load",
        "host",
        "timers",
        "early",
        "lost",
        "p50 us",
        "p99 us",
        "p99.9 us",
        "max us",
        "p99 by round",
        "exits/timer",
        "other exits",
        "wake-ups/timer",
    ];
    report.table = vec![header.map(str::to_owned).to_vec()];
    let us = |ns: u64| figure(ns as f64 / 1000.0);
    for row in rows {
        let by_round: Vec<_> = row.ns_p99_by_round.iter().map(|ns| us(*ns)).collect();
        report.table.push(vec![
            row.server.name().into(),
            row.poll_us.to_string(),
            if row.competitor { "busy" } else { "idle" }.into(),
            row.host_kind.into(),
            row.armed.to_string(),
            row.early.to_string(),
            row.lost.to_string(),
            us(row.ns_p50),
            us(row.ns_p99),
            us(row.ns_p999),
            us(row.ns_max),
            by_round.join(" "),
            figure(row.arming_exits_per_timer),
            row.other_exits.to_string(),
            figure(row.housekeeping_wakeups_per_timer),
        ]);
    }
    report.notes.extend(verdicts(rows));
    report.plot = Some(Plot {
        title: "Timer latency, idle".into(),
        x: "share of timers, %".into(),
        y: "lateness, us".into(),
        log_y: true,
        shape: Shape::Lines(series(sums, configs)),
    });
    report
}

/// What must be so, and what is to be compared.
fn verdicts(rows: &[Row]) -> Vec<String> {
    let wrong: u64 = rows.iter().map(|row| row.early + row.lost + row.extra).sum();
    let mut notes = vec![format!(
        "early, lost and double fires in {} timers: {wrong} (must be 0)",
        rows.iter().map(|row| row.armed).sum::<u64>()
    )];
    for competitor in [false, true] {
        let find = |server, poll_us| {
            rows.iter().find(|row| {
                row.server == server && row.poll_us == poll_us && row.competitor == competitor
            })
        };
        let Some(kernel) = find(Server::Kernel, 0) else { continue };
        for server in [Server::Offload, Server::Stimer] {
            let Some(row) = find(server, 50) else { continue };
            let best = |row: &Row| row.ns_p99_by_round.iter().copied().min().unwrap_or(0);
            let ratio = |ours: u64, kernel: u64| figure(ours as f64 / kernel.max(1) as f64);
            notes.push(format!(
                "{}: {} with 50 us of polling is {}x as late as kernel at p50, {}x at p99, {}x at \
                 the p99 of each one's best round",
                if competitor { "busy" } else { "idle" },
                server.name(),
                ratio(row.ns_p50, kernel.ns_p50),
                ratio(row.ns_p99, kernel.ns_p99),
                ratio(best(row), best(kernel)),
            ));
        }
    }
    notes
}

/// Lateness against the share of timers that are no later.
fn series(sums: &[Option<Sum>], configs: &[Config]) -> Vec<Series> {
    let idle = configs.iter().zip(sums).filter(|(config, _)| !config.busy);
    idle.filter_map(|(config, sum)| {
        let sum = sum.as_ref()?;
        let point = |percent: u32| {
            let ns = sum.lateness_ns.value_at_quantile(f64::from(percent) / 100.0).max(1);
            (f64::from(percent), ns as f64 / 1000.0)
        };
        let name = format!("{} poll {}", config.server.name(), config.poll_us);
        Some(Series { name, points: (1..=100).map(point).collect() })
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::Kind;
    use std::time::Duration;

    fn outcome(stats: serde_json::Value) -> Outcome {
        Outcome {
            status: 0,
            console: String::new(),
            stderr: String::new(),
            stats,
            kind: Kind::Lab,
            elapsed: Duration::ZERO,
        }
    }

    #[test]
    fn rounds_are_merged_and_exits_told_apart() {
        let line = json!({"armed": 10, "early": 0, "lost": 1, "extra": 0, "ns_p99": 900,
                          "histogram_ns": [[100, 8], [900, 1]]});
        let ran = outcome(json!({
            "exits": {
                "reasons": {"port_write": {"count": 99}, "msr_write": {"count": 12}, "halt": {"count": 0}},
                "msrs": [{"name": "0x6e0", "writes": {"count": 10}}],
            },
            "housekeeping": [{"wakeups": 15}, {"wakeups": 5}],
        }));
        let mut sum = None;
        for _ in 0..2 {
            add(&mut sum, Server::Offload, line.as_object().unwrap(), &ran).unwrap();
        }
        let config = Config { server: Server::Offload, poll_us: 0, busy: false };
        let row = row(config, &sum.unwrap());
        assert_eq!((row.armed, row.lost, row.ns_p50, row.ns_max), (20, 2, 100, 900));
        assert_eq!((row.arming_exits_per_timer, row.other_exits), (1.0, 4));
        assert_eq!(row.housekeeping_wakeups_per_timer, 2.0);
        assert_eq!(row.ns_p99_by_round, [900, 900]);
        assert!(verdicts(&[row])[0].contains("timers: 2 "));
    }

    #[test]
    fn without_a_competitor_half_is_left_out() {
        assert_eq!(configs(true).len(), 2 * configs(false).len());
    }
}
