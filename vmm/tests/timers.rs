//! Timers of bare-metal guests on this machine's /dev/kvm, and the threads that
//! fire them.

mod common;

use common::{guest, kvm_or_skip, results, run, tail, vmm};
use serde_json::Value;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use vmm::pinning;

const LIMIT: Duration = Duration::from_secs(90);

/// What a run of the timer guest printed, and what `--stats` wrote.
fn timers(cmdline: &str, arguments: &[&str]) -> Option<(Value, Value)> {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let stats = directory.path().join("stats.json");
    let mut command = vmm();
    command.arg("--kernel").arg(guest("guest-timer")).args(["--cmdline", cmdline]);
    let ran = run(command.args(arguments).arg("--stats").arg(&stats), LIMIT);
    if ran.status == 35 && ran.stderr.contains("use --hv-stimer") {
        println!("SKIPPED {cmdline}: {}", ran.stderr);
        return None;
    }
    assert_eq!(ran.status, 0, "{}\n{}", ran.stderr, tail(&ran.stdout));
    let line = results(&ran.stdout).pop().expect("a result");
    let stats = std::fs::read_to_string(stats).expect("statistics");
    Some((line, serde_json::from_str(&stats).expect("JSON")))
}

fn msr_writes(stats: &Value, msr: &str) -> u64 {
    let rows = stats["exits"]["msrs"].as_array().expect("MSRs");
    let row = rows.iter().find(|row| row["name"] == msr);
    row.map_or(0, |row| row["writes"]["count"].as_u64().expect("a count"))
}

/// The last CPU this process may use: with luck not the one where the rest happens.
fn last_cpu() -> String {
    pinning::allowed_cpus().0.last().expect("a CPU").to_string()
}

#[test]
fn each_timer_fires_once_and_never_early_for_one_exit() {
    if !kvm_or_skip("each_timer_fires_once_and_never_early_for_one_exit") {
        return;
    }
    let last = last_cpu();
    let pinned = ["--hk-poll", "50", "--housekeeping", &last];
    for (mode, arguments, msr) in [
        ("lapic-deadline", &["--hv-tsc-page"][..], None),
        ("lapic-deadline", &["--hv-tsc-page", "--lapic-timer", "offload"], Some("0x6e0")),
        ("lapic-deadline", &["--hv-ref-counter", "--lapic-timer", "offload"], Some("0x6e0")),
        ("stimer", &["--hv-stimer"], Some("0x400000b1")),
    ] {
        for wait in ["halt", "spin"] {
            for cpus in ["1", "2"] {
                let cmdline = format!("mode={mode} wait={wait} count=200 min_us=1 max_us=1000");
                let arguments = [arguments, &pinned[..], &["--cpus", cpus]].concat();
                let Some((line, stats)) = timers(&cmdline, &arguments) else { continue };
                let armed = line["armed"].as_u64().expect("a count");
                assert_eq!(armed, 200 * cpus.parse::<u64>().expect("a number"));
                for (what, expected) in [("fired", armed), ("early", 0), ("lost", 0), ("extra", 0)]
                {
                    assert_eq!(line[what], expected, "{arguments:?} {what}: {line}");
                }
                let Some(msr) = msr else { continue };
                assert_eq!(msr_writes(&stats, msr), armed, "one exit to arm each");
                let reasons = stats["exits"]["reasons"].as_object().expect("reasons");
                let other: u64 = ["halt", "other", "mmio_read", "mmio_write"]
                    .iter()
                    .map(|reason| reasons[*reason]["count"].as_u64().expect("a count"))
                    .sum();
                assert_eq!(other, 0, "{arguments:?}: exits to fire {reasons:?}");
                let keeper = &stats["housekeeping"][0];
                assert!(keeper["due"].as_u64() <= Some(armed), "{keeper}");
            }
        }
    }
}

#[test]
fn threads_run_where_they_are_told() {
    if !kvm_or_skip("threads_run_where_they_are_told") {
        return;
    }
    let allowed = pinning::allowed_cpus();
    let (own, all) = (last_cpu(), allowed.to_string());
    let mut child = vmm()
        .arg("--kernel")
        .arg(guest("guest-end"))
        .args(["--cmdline", "how=halt", "--timeout", "60", "--hv-stimer", "--cpus", "2"])
        .args(["--pin", &format!("1={own}"), "--housekeeping", &all])
        .stdout(Stdio::null())
        .spawn()
        .expect("the binary starts");
    let mut wanted: Vec<(String, String)> =
        allowed.0.iter().map(|cpu| (format!("hk-{cpu}"), cpu.to_string())).collect();
    wanted.extend([("vcpu0".into(), all), ("vcpu1".into(), own)]);
    wanted.sort();
    let start = Instant::now();
    let found = loop {
        let found = threads(child.id());
        if found == wanted || start.elapsed() > Duration::from_secs(30) {
            break found;
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    child.kill().expect("our child");
    child.wait().expect("our child");
    assert_eq!(found, wanted);
}

/// Name and allowed CPUs of a process's vCPU and housekeeping threads.
fn threads(process: u32) -> Vec<(String, String)> {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{process}/task")) else { return vec![] };
    let mut threads: Vec<_> = tasks
        .filter_map(|task| {
            let task = task.ok()?.path();
            let name = std::fs::read_to_string(task.join("comm")).ok()?.trim().to_owned();
            let status = std::fs::read_to_string(task.join("status")).ok()?;
            let list = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:"))?;
            Some((name, list.trim().to_owned()))
        })
        .filter(|(name, _)| name.starts_with("hk-") || name.starts_with("vcpu"))
        .collect();
    threads.sort();
    threads
}

#[test]
fn what_cannot_be_is_one_line() {
    if !kvm_or_skip("what_cannot_be_is_one_line") {
        return;
    }
    for (arguments, word) in [
        (&["--pin", "9999"][..], "--pin: CPU 9999"),
        (&["--pin", "0=9999"], "--pin: CPU 9999"),
        (&["--pin", "5=0"], "--pin: there is no vCPU 5"),
        (&["--housekeeping", "9999"], "--housekeeping: CPU 9999"),
        (&["--housekeeping", "3-1"], "--housekeeping"),
        (&["--pin", ""], "--pin"),
        (&["--rt-prio", "0"], "--rt-prio"),
        (&["--rt-prio", "99"], "--rt-prio"),
        (&["--rt-prio", "1", "--hk-poll", "1"], "--housekeeping"),
        (&["--rt-prio", "1", "--hk-poll", "1", "--pin", "0"], "--housekeeping"),
        (&["--rt-prio", "1", "--hk-poll", "1", "--pin", "0", "--housekeeping", "0"], "--pin"),
        (&["--rt-prio", "1", "--hk-poll", "1", "--hv-stimer"], "--pin"),
        (&["--hk-poll", "-1"], "--hk-poll"),
        (&["--hv-stimer", "--hv-impl", "kernel"], "--hv-impl user"),
        (&["--lapic-timer", "elsewhere"], "--lapic-timer"),
    ] {
        let ran = run(vmm().arg("--kernel").arg(guest("guest-end")).args(arguments), LIMIT);
        assert_eq!(ran.status, 35, "{arguments:?}: {}", ran.stderr);
        assert!(ran.stderr.contains(word), "{arguments:?}: {}", ran.stderr);
        assert_eq!(ran.stderr.lines().count(), 1, "{arguments:?}: {}", ran.stderr);
    }
}

#[test]
fn without_the_privilege_real_time_is_refused() {
    if !kvm_or_skip("without_the_privilege_real_time_is_refused") {
        return;
    }
    // Root without CAP_SYS_NICE, or a user who is not allowed any priority.
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set", "-sys_nice", "prlimit", "--rtprio=0:0"]);
    command.arg(env!("CARGO_BIN_EXE_vmm")).arg("--kernel").arg(guest("guest-end"));
    let ran = run(command.args(["--rt-prio", "50"]), LIMIT);
    assert_eq!(ran.status, 35, "{}", ran.stderr);
    assert!(ran.stderr.contains("--rt-prio: no real-time"), "{}", ran.stderr);
    assert_eq!(ran.stderr.lines().count(), 1, "{}", ran.stderr);
}

/// A guest that never halts, with its timers on its own CPU: they fire all the same.
#[test]
fn in_real_time_a_busy_guest_does_not_keep_its_timers_off_the_cpu() {
    if !kvm_or_skip("in_real_time_a_busy_guest_does_not_keep_its_timers_off_the_cpu") {
        return;
    }
    let cpu = pinning::allowed_cpus().0[0].to_string();
    let mut command = vmm();
    command.arg("--kernel").arg(guest("guest-hpet-ticks"));
    command.args(["--cmdline", "period=100000 ms=1000", "--pin", &cpu, "--housekeeping", &cpu]);
    let ran = run(command.args(["--rt-prio", "1"]), LIMIT);
    if ran.status == 35 && ran.stderr.contains("no real-time") {
        println!("SKIPPED in_real_time_a_busy_guest: {}", ran.stderr.trim());
        return;
    }
    assert_eq!(ran.status, 0, "{}", ran.stderr);
    let seen = results(&ran.stdout).into_iter().find(|line| line.get("interrupts").is_some());
    let interrupts = seen.as_ref().and_then(|line| line["interrupts"].as_u64());
    // One a millisecond; a busy host merges some. Without a priority of its own: one.
    assert!(interrupts >= Some(100), "{seen:?}");
}
