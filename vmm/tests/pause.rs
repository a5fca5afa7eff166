//! Pause and continue, from the socket and by signals: no clock goes back, no timer
//! is lost, none fires twice. `STOP_SECONDS=60` is the full length of a SIGSTOP.

#![allow(clippy::unwrap_used)] // a failed unwrap is a failed test

mod common;
#[path = "common/control.rs"]
mod control;

use common::{guest, kvm_or_skip, results, vmm, wait};
use control::Client;
use serde_json::Value;
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(240);
const CYCLES: u32 = 1000;

/// A machine with a control socket.
struct Machine {
    child: Child,
    control: Client,
    _directory: tempfile::TempDir,
}

impl Machine {
    fn start(guest_name: &str, words: &str, arguments: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control");
        let mut command = vmm();
        command.arg("--kernel").arg(guest(guest_name)).args(["--cmdline", words]);
        command.args(arguments).arg("--control").arg(&path);
        let child = start(&mut command);
        Self { child, control: Client::connect(&path), _directory: directory }
    }

    fn ask(&mut self, command: &str) -> Option<Value> {
        self.control.ask(command)
    }

    fn reference(&mut self) -> Option<u64> {
        self.control.reference()
    }

    /// Whether the guest has enabled its page, and so is past its boot code.
    fn has_page(&mut self) -> bool {
        let exits = self.ask("stats").unwrap();
        exits["msrs"].as_array().unwrap().iter().any(|row| row["name"] == "0x40000021")
    }

    /// The guest's only result, at its power-off, without its histogram.
    fn result(mut self) -> Value {
        let mut console = String::new();
        self.child.stdout.take().unwrap().read_to_string(&mut console).unwrap();
        assert_eq!(wait(&mut self.child, LIMIT), Some(0), "{console}");
        let mut result = results(&console).pop().expect("a result");
        result.as_object_mut().expect("an object").remove("histogram_ns");
        result
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Fails where it has ended, as it should have.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn start(command: &mut Command) -> Child {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().expect("the binary starts")
}

/// Pauses and continues until the guest has ended; returns how often.
fn pause_until_the_end(machine: &mut Machine) -> u32 {
    let mut cycles = 0;
    let mut last = 0;
    loop {
        let Some(paused) = machine.ask("pause") else { return cycles };
        let stopped = paused["reference_100ns"].as_u64().unwrap();
        assert!(paused["state"] != "running", "{paused}");
        assert!(stopped >= last, "{stopped} after {last}");
        if paused["state"] == "paused" {
            assert_eq!(machine.reference(), Some(stopped), "time passed in a paused machine");
        }
        let Some(resumed) = machine.ask("resume") else { return cycles };
        last = resumed["reference_100ns"].as_u64().unwrap();
        assert!(last >= stopped, "{last} after {stopped}");
        cycles += 1;
        // A millisecond of the guest's time, so that it gets somewhere.
        loop {
            let Some(now) = machine.reference() else { return cycles };
            assert!(now >= last, "{now} after {last}");
            if now > last + 10_000 {
                break;
            }
        }
    }
}

#[test]
fn every_clock_is_monotonic_across_a_thousand_pauses() {
    if !kvm_or_skip("every_clock_is_monotonic_across_a_thousand_pauses") {
        return;
    }
    let (mut cycles, mut hops) = (0, 0);
    // A guest that ends early on a fast host is started again.
    while cycles < CYCLES {
        let words = "mix=all hops=6000 cpus=2";
        let arguments = ["--cpus", "2", "--hv-tsc-page", "--hpet", "exit"];
        let mut machine = Machine::start("guest-order", words, &arguments);
        cycles += pause_until_the_end(&mut machine);
        let result = machine.result();
        assert_eq!(
            (&result["backward"], &result["hpet_apart"]),
            (&0.into(), &0.into()),
            "{result}"
        );
        hops += result["hops"].as_u64().unwrap();
    }
    println!("{cycles} pauses, {hops} readings of page, MSR and HPET by two vCPUs: 0 backward");
}

/// An AP's thread may be late: a pause that comes before it has ever entered the guest
/// must not wait for it for ever, nor may it slip into the guest.
#[test]
fn a_pause_right_after_the_start_stops_every_vcpu() {
    if !kvm_or_skip("a_pause_right_after_the_start_stops_every_vcpu") {
        return;
    }
    for round in 0..30 {
        let arguments = ["--cpus", "32", "--memory", "32M"];
        let mut machine = Machine::start("guest-end", "how=halt", &arguments);
        for command in ["pause", "resume", "pause"] {
            let answer = machine.ask(command).unwrap_or_else(|| panic!("{round}: {command}"));
            let state = if command == "pause" { "paused" } else { "running" };
            assert_eq!(answer["state"], state, "{round}");
        }
        assert!(machine.ask("quit").is_some(), "{round}");
        assert_eq!(wait(&mut machine.child, LIMIT), Some(0), "{round}");
    }
}

/// Whatever was asked of a machine while its vCPUs came up, a signal ends it.
#[test]
fn random_acts_and_then_a_signal_leave_no_machine_behind() {
    if !kvm_or_skip("random_acts_and_then_a_signal_leave_no_machine_behind") {
        return;
    }
    const ACTS: [&str; 5] = ["pause", "resume", "status", "stats", "republish"];
    const TIMERS: [&str; 5] = ["--hv-stimer", "--hpet", "page", "--lapic-timer", "offload"];
    let mut random = 0x2545_f491_4f6c_dd1d_u64;
    let mut below = |n: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % n
    };
    let mut slowest = Duration::ZERO;
    for round in 0..60 {
        let words = ["how=halt cpus=8", "how=spin cpus=8"][below(2) as usize];
        let arguments = [&["--cpus", "8"], &TIMERS[..5 * below(2) as usize]].concat();
        let mut machine = Machine::start("guest-end", words, &arguments);
        for _ in 0..below(6) {
            let act = ACTS[below(5) as usize];
            assert!(machine.ask(act).is_some(), "{round}: {act}");
            // These pauses are the experiment, not a wait.
            std::thread::sleep(Duration::from_micros(below(30_000)));
        }
        let (number, sent) = ([libc::SIGTERM, libc::SIGINT][below(2) as usize], Instant::now());
        signal(&machine, number);
        let code = wait(&mut machine.child, Duration::from_secs(20));
        assert_eq!(code, Some(128 + number), "{round}: {words} {arguments:?}");
        slowest = slowest.max(sent.elapsed());
    }
    println!("60 machines of 8 vCPUs: the slowest end took {slowest:?}");
}

/// Every armed timer fires, once, and not early, though the machine is paused again
/// and again.
fn timers_survive_pauses(mode: &str, arguments: &[&str]) {
    let words = format!("mode={mode} count=200 max_us=3000 cpus=1");
    let mut machine = Machine::start("guest-timer", &words, arguments);
    let cycles = pause_until_the_end(&mut machine);
    let result = machine.result();
    println!("{mode} {arguments:?}: {cycles} pauses, {result}");
    let fired = (&result["fired"], &result["early"], &result["lost"], &result["extra"]);
    assert_eq!(fired, (&200.into(), &0.into(), &0.into(), &0.into()), "{result}");
    assert!(cycles > 20, "{cycles} pauses");
}

#[test]
fn timers_survive_pauses_whoever_serves_them() {
    if !kvm_or_skip("timers_survive_pauses_whoever_serves_them") {
        return;
    }
    timers_survive_pauses("lapic-deadline", &["--hv-tsc-page", "--lapic-timer", "kernel"]);
    timers_survive_pauses("lapic-deadline", &["--hv-tsc-page", "--lapic-timer", "offload"]);
    timers_survive_pauses("stimer", &["--hv-stimer"]);
}

fn signal(machine: &Machine, number: libc::c_int) {
    // SAFETY: a signal to our own child.
    unsafe { libc::kill(machine.child.id() as i32, number) };
}

/// Stops the process amid timers and lets it go on: returns the guest's result and how
/// far reference time went meanwhile.
fn stopped_amid_timers(number: libc::c_int, seconds: u64) -> (Value, Duration) {
    let words = "mode=stimer count=300 min_us=1000 max_us=5000 cpus=1";
    let mut machine = Machine::start("guest-timer", words, &["--hv-stimer"]);
    while !machine.has_page() {}
    let before = machine.reference().unwrap();
    signal(&machine, number);
    std::thread::sleep(Duration::from_secs(seconds));
    signal(&machine, libc::SIGCONT);
    let after = machine.reference().unwrap();
    assert!(after >= before, "{after} after {before}");
    let passed = Duration::from_nanos((after - before) * 100);
    (machine.result(), passed)
}

#[test]
fn a_stopped_process_loses_no_timer_and_starts_no_storm() {
    if !kvm_or_skip("a_stopped_process_loses_no_timer_and_starts_no_storm") {
        return;
    }
    let seconds = std::env::var("STOP_SECONDS").ok().and_then(|s| s.parse().ok()).unwrap_or(3);
    for (number, name, time_passes) in
        [(libc::SIGSTOP, "SIGSTOP", true), (libc::SIGTSTP, "SIGTSTP", false)]
    {
        let (result, passed) = stopped_amid_timers(number, seconds);
        println!("{name} for {seconds} s: reference time went {passed:?}, {result}");
        let fired = (&result["fired"], &result["early"], &result["lost"], &result["extra"]);
        assert_eq!(fired, (&300.into(), &0.into(), &0.into(), &0.into()), "{name}: {result}");
        assert_eq!(passed >= Duration::from_secs(seconds), time_passes, "{name}: {passed:?}");
    }
}
