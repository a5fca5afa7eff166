//! The HPET of the real binary, from inside a guest.

#![allow(clippy::unwrap_used)] // a failed unwrap is a failed test

mod common;

use common::{Outcome, gather, guest, kvm_or_skip, results, run, tail, vmm, wait};
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(100);

fn boot(name: &str, arguments: &[&str]) -> Outcome {
    let ran = run(vmm().arg("--kernel").arg(guest(name)).args(arguments), LIMIT);
    assert_eq!(ran.status, 0, "{arguments:?}: {}\n{}", ran.stderr, tail(&ran.stdout));
    ran
}

/// The one result line that has the field `key`.
fn line(ran: &Outcome, key: &str) -> Value {
    let lines = results(&ran.stdout);
    let found = lines.into_iter().find(|line| line.get(key).is_some());
    found.unwrap_or_else(|| panic!("no {key}:\n{}", ran.stdout))
}

fn count(line: &Value, key: &str) -> u64 {
    line[key].as_u64().unwrap_or_else(|| panic!("no number {key} in {line}"))
}

#[test]
fn page_and_exit_are_the_same_to_the_conformance_guest() {
    if !kvm_or_skip("page_and_exit_are_the_same_to_the_conformance_guest") {
        return;
    }
    for timers in ["3", "8"] {
        let conform = |mode| {
            let ran = boot("guest-hpet-conformance", &["--hpet", mode, "--hpet-timers", timers]);
            assert_eq!(count(&line(&ran, "failed"), "failed"), 0, "{mode}:\n{}", ran.stdout);
            ran.stdout
        };
        assert_eq!(conform("exit"), conform("page"));
    }
}

#[test]
fn without_an_hpet_nothing_answers() {
    if !kvm_or_skip("without_an_hpet_nothing_answers") {
        return;
    }
    let arguments = ["--hpet", "off", "--hv-tsc-page", "--cmdline", "clock=hpet"];
    let kernel = guest("guest-hpet-contention");
    let ran = run(vmm().arg("--kernel").arg(kernel).args(arguments), LIMIT);
    assert!(ran.stdout.contains("this machine has none"), "{}", ran.stdout);
}

/// Two vCPUs read for `ms` and compare with each other every `check_every` reads;
/// returns the number of reads, none of which went back.
fn read_by_two(mode: &str, ms: u32, check_every: u32) -> u64 {
    let words = format!("clock=hpet ms={ms} check_every={check_every} cpus=2");
    let arguments = ["--hpet", mode, "--cpus", "2", "--hv-tsc-page", "--cmdline", &words];
    let ran = boot("guest-hpet-contention", &arguments);
    let seen = line(&ran, "backward");
    assert_eq!((count(&seen, "backward"), count(&seen, "cpus")), (0, 2), "{mode}: {seen}");
    count(&seen, "reads")
}

#[test]
fn the_counter_never_goes_back_between_vcpus() {
    if !kvm_or_skip("the_counter_never_goes_back_between_vcpus") {
        return;
    }
    // Exits take up to 100 µs where ring 0 is interpreted.
    assert!(read_by_two("exit", 2000, 1) >= 1_000);
    assert!(read_by_two("page", 2000, 1) >= 1_000_000);
}

#[test]
fn a_thousand_million_reads_of_the_page_never_go_back() {
    if !kvm_or_skip("a_thousand_million_reads_of_the_page_never_go_back") {
        return;
    }
    let mut reads = 0;
    for _ in 0..20 {
        reads += read_by_two("page", 2000, 256);
        if reads >= 1_000_000_000 {
            println!("{reads} reads, none went back");
            return;
        }
    }
    panic!("only {reads} reads in 40 s");
}

#[test]
fn a_page_read_is_no_exit() {
    if !kvm_or_skip("a_page_read_is_no_exit") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("stats.json");
    let shown = file.display().to_string();
    let arguments = ["--hpet", "page", "--hv-tsc-page", "--stats", &shown, "-v"];
    let ran =
        boot("guest-hpet-contention", &[&arguments[..], &["--cmdline", "clock=hpet"]].concat());
    assert!(count(&line(&ran, "reads"), "reads") > 100_000, "{}", ran.stdout);
    let stats: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let devices = stats["exits"]["mmio"].as_array().expect("rows of the MMIO bus");
    let hpet = devices.iter().find(|row| row["name"] == "hpet").expect("a row of the HPET");
    assert_eq!(hpet["reads"]["count"], 0, "{hpet}");
    assert!(count(&hpet["writes"], "count") >= 1, "the guest starts the counter: {hpet}");
    let page = &stats["hpet"]["page"];
    assert!(count(page, "stores") > 0 && page["mean_ns"].as_f64() > Some(0.0), "{page}");
    assert!(ran.stderr.contains("HPET page: "), "{}", ran.stderr);
}

#[test]
fn the_page_keeps_the_period_it_is_given() {
    if !kvm_or_skip("the_page_keeps_the_period_it_is_given") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("stats.json");
    let shown = file.display().to_string();
    for period in [2_000, 500_000] {
        let text = period.to_string();
        let arguments = ["--hpet", "page", "--hpet-page-period", &text, "--stats", &shown];
        let more = ["--hv-tsc-page", "--cmdline", "clock=hpet"];
        boot("guest-hpet-contention", &[&arguments[..], &more].concat());
        let stats: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        let page = &stats["hpet"]["page"];
        assert_eq!(count(page, "period_ns"), period, "{page}");
        assert!(page["mean_ns"].as_f64().expect("a mean") >= period as f64, "{page}");
    }
}

/// Timers that are armed as no sane guest would: the guest goes on, at most
/// 100 000 interrupts a second come, and the machine ends when it is told to.
#[test]
fn no_period_stops_the_guest_or_us() {
    if !kvm_or_skip("no_period_stops_the_guest_or_us") {
        return;
    }
    for mode in ["exit", "page"] {
        // The fewest and the most interrupts; no bound but the rate where a timer repeats.
        for (words, fewest, most) in [
            ("timers=1 period=0", 0, 0),
            ("timers=1 period=1", 2, u64::MAX),
            ("timers=1 period=1 first=0", 0, 0),
            ("timers=32 period=1", 2, u64::MAX),
            ("timers=32 period=0 first=1", 1, 32),
        ] {
            let arguments = ["--hpet", mode, "--hpet-timers", "32", "--hv-tsc-page"];
            let ran = boot("guest-hpet-ticks", &[&arguments[..], &["--cmdline", words]].concat());
            let seen = line(&ran, "interrupts");
            let most = most.min(count(&seen, "elapsed_ms") * 100 + 32);
            let interrupts = count(&seen, "interrupts");
            assert!((fewest..=most).contains(&interrupts), "{mode} {words}: {seen}");
            assert!(count(&seen, "rounds") > 10_000, "{mode} {words}: {seen}");
        }
    }
}

#[test]
fn a_machine_under_a_timer_storm_still_ends_when_told() {
    if !kvm_or_skip("a_machine_under_a_timer_storm_still_ends_when_told") {
        return;
    }
    let mut child = ticking("timers=32 period=1 ms=100000", &["--hpet-timers", "32"]);
    let asked = Instant::now();
    signal(&child.process, libc::SIGTERM);
    let status = wait(&mut child.process, LIMIT);
    assert_eq!(status, Some(128 + libc::SIGTERM), "{}", child.finish());
    assert!(asked.elapsed() < Duration::from_secs(5), "{:?}", asked.elapsed());
}

/// Stops the process and lets it go on: what was missed does not come at once.
/// `HPET_STOP_SECONDS` makes it longer than the usual 3 s.
#[test]
fn a_stopped_process_catches_up_with_no_storm() {
    if !kvm_or_skip("a_stopped_process_catches_up_with_no_storm") {
        return;
    }
    let seconds = std::env::var("HPET_STOP_SECONDS").map_or(3, |text| text.parse().unwrap());
    // A tick every millisecond, and two seconds of running besides the stop.
    let words = format!("period=100000 window_us=20000 ms={}", (seconds + 2) * 1000);
    let mut child = ticking(&words, &[]);
    signal(&child.process, libc::SIGSTOP);
    std::thread::sleep(Duration::from_secs(seconds));
    signal(&child.process, libc::SIGCONT);
    let status = wait(&mut child.process, LIMIT + Duration::from_secs(seconds));
    let console = child.finish();
    assert_eq!(status, Some(0), "{console}");
    let lines = results(&console);
    let seen = lines.iter().find(|line| line.get("interrupts").is_some()).expect("the end");
    // 20 in a window of 20 ms, one for the stop, and one at either edge.
    assert!(count(seen, "most_in_window") <= 23, "{seen}");
    assert!(count(seen, "interrupts") <= 2_000 + 50, "{seen}");
    // A busy host merges ticks; it must not lose the timer.
    assert!(count(seen, "interrupts") >= 20, "{seen}");
}

#[test]
fn its_threads_run_on_housekeeping_cpus() {
    if !kvm_or_skip("its_threads_run_on_housekeeping_cpus") {
        return;
    }
    let arguments = ["--hpet", "page", "--housekeeping", "0"];
    let mut child = ticking("then=halt", &arguments);
    let tasks = format!("/proc/{}/task", child.process.id());
    let mut seen = Vec::new();
    for task in std::fs::read_dir(tasks).expect("threads") {
        let path = task.expect("a thread").path();
        let name = std::fs::read_to_string(path.join("comm")).expect("a name");
        if name.starts_with("hpet-") || name.starts_with("hk") {
            let status = std::fs::read_to_string(path.join("status")).expect("its status");
            let allowed = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:"));
            assert_eq!(allowed.map(str::trim), Some("0"), "{name}");
            seen.push(name.trim_end().to_owned());
        }
    }
    seen.sort();
    assert_eq!(seen, ["hk-0", "hpet-page"]);
    signal(&child.process, libc::SIGTERM);
    assert_eq!(wait(&mut child.process, LIMIT), Some(128 + libc::SIGTERM), "{}", child.finish());
}

/// A halted guest whose HPET counts, with timers that match at every tick but may
/// not interrupt: nothing of ours runs, and no deadline is waited for.
#[test]
fn an_idle_guest_costs_no_cpu() {
    if !kvm_or_skip("an_idle_guest_costs_no_cpu") {
        return;
    }
    const WATCHED: Duration = Duration::from_secs(3);
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("stats.json");
    let shown = file.display().to_string();
    let words = "timers=3 period=1 interrupts=0 then=halt";
    let mut child = ticking(words, &["--stats", &shown]);
    std::thread::sleep(Duration::from_millis(200));
    let before = cpu_time(&child.process);
    std::thread::sleep(WATCHED);
    let spent = cpu_time(&child.process) - before;
    signal(&child.process, libc::SIGTERM);
    let status = wait(&mut child.process, LIMIT);
    assert_eq!(status, Some(128 + libc::SIGTERM), "{}", child.finish());
    // The kernel counts in steps of 10 ms.
    assert!(spent <= WATCHED / 100 + Duration::from_millis(10), "{spent:?}");
    let stats: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    assert_eq!(count(&stats["hpet"], "timer_expiries"), 0, "{}", stats["hpet"]);
}

/// CPU time of a process so far, its vCPUs' included (proc(5): utime and stime).
fn cpu_time(child: &Child) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).expect("proc");
    let after_name = stat.rsplit_once(')').expect("a name").1;
    let ticks: u64 = after_name
        .split_whitespace()
        .skip(11)
        .take(2)
        .map(|f| f.parse::<u64>().expect("ticks"))
        .sum();
    // SAFETY: asks for a constant.
    let hz = u64::try_from(unsafe { libc::sysconf(libc::_SC_CLK_TCK) }).expect("a rate");
    Duration::from_millis(ticks * 1000 / hz)
}

/// A guest with its timers armed.
struct Ticking {
    process: Child,
    console: Option<std::thread::JoinHandle<String>>,
    said: String,
}

impl Drop for Ticking {
    /// A failed test leaves nothing running; a guest that has ended is left alone.
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Ticking {
    /// All that the guest said, at its end.
    fn finish(mut self) -> String {
        let rest = self.console.take().map(|console| console.join().expect("text"));
        std::mem::take(&mut self.said) + &rest.unwrap_or_default()
    }
}

fn ticking(words: &str, arguments: &[&str]) -> Ticking {
    let mut process = vmm()
        .arg("--kernel")
        .arg(guest("guest-hpet-ticks"))
        .args(["--hv-tsc-page", "--cmdline", words])
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    let mut console = BufReader::new(process.stdout.take().expect("piped"));
    let mut said = String::new();
    while !said.contains("\"armed\"") {
        assert!(console.read_line(&mut said).expect("text") > 0, "{said}");
    }
    Ticking { process, console: Some(gather(console)), said }
}

fn signal(child: &Child, number: i32) {
    let id = i32::try_from(child.id()).expect("a process id");
    // SAFETY: signals a child that has not been waited for; reads no memory.
    assert_eq!(unsafe { libc::kill(id, number) }, 0);
}
