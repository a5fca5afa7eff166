//! Bare-metal guests on this machine's /dev/kvm.

#![allow(clippy::unwrap_used)] // a failed unwrap is a failed test

mod common;

use common::{Outcome, guest, kvm_or_skip, results, run, tail, vmm};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);

fn boot(name: &str, arguments: &[&str]) -> Outcome {
    run(vmm().arg("--kernel").arg(guest(name)).args(arguments), LIMIT)
}

fn end(how: &str, arguments: &[&str]) -> Outcome {
    let cmdline = format!("how={how}");
    boot("guest-end", &[&["--cmdline", cmdline.as_str()], arguments].concat())
}

#[test]
fn every_ending_has_its_code() {
    if !kvm_or_skip("every_ending_has_its_code") {
        return;
    }
    for (how, arguments, code) in [
        ("power-off", &[][..], 0),
        ("reset", &[], 32),
        ("reboot", &[], 40),
        ("panic", &[], 34),
        ("triple-fault", &[], 33),
        ("halt", &["--timeout", "0.5"], 36),
        ("spin", &["--timeout", "0.5", "--cpus", "2"], 36),
        ("emulation-failure", &[], 37),
    ] {
        let outcome = end(how, arguments);
        assert_eq!(outcome.status, code, "{how}: {}\n{}", outcome.stderr, tail(&outcome.stdout));
    }
}

#[test]
fn an_internal_error_tells_where() {
    if !kvm_or_skip("an_internal_error_tells_where") {
        return;
    }
    let outcome = end("emulation-failure", &[]);
    assert!(outcome.stderr.contains("RIP 0x"), "{}", outcome.stderr);
    assert!(outcome.stderr.contains("instruction bytes"), "{}", outcome.stderr);
    assert_eq!(outcome.stderr.lines().count(), 1, "{}", outcome.stderr);
}

#[test]
fn our_words_go_to_stderr_alone() {
    if !kvm_or_skip("our_words_go_to_stderr_alone") {
        return;
    }
    let outcome = end("power-off", &["-v"]);
    assert!(outcome.stderr.contains("powered off"), "{}", outcome.stderr);
    assert!(!outcome.stdout.contains("vmm:"), "{}", outcome.stdout);
}

#[test]
fn page_and_counter_agree_and_the_page_costs_no_exit() {
    if !kvm_or_skip("page_and_counter_agree_and_the_page_costs_no_exit") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let stats = directory.path().join("stats.json");
    let outcome = boot(
        "guest-clock-cost",
        &["--cpus", "2", "--hv-tsc-page", "--stats", &stats.display().to_string()],
    );
    assert_eq!(outcome.status, 0, "{}\n{}", outcome.stderr, tail(&outcome.stdout));
    let lines = results(&outcome.stdout);
    let check = lines.iter().find(|l| l.get("check").is_some()).expect("the interleaved check");
    assert_eq!(check["msr_behind"], 0, "{check}");
    assert_eq!(check["page_behind"], 0, "{check}");
    assert_eq!(check["invalid"], 0, "{check}");
    assert!(check["pairs"].as_u64() >= Some(1000), "{check}");

    let p50 = |clock: &str| {
        let line = lines.iter().find(|l| l["clock"] == clock).expect(clock);
        line["cycles_p50"].as_f64().expect("a number")
    };
    // The document's ratio is 68.6; exits here cost more, the page less.
    assert!(p50("msr") / p50("page") >= 68.0, "{} {}", p50("msr"), p50("page"));

    let stats: serde_json::Value = serde_json::from_slice(&std::fs::read(stats).unwrap()).unwrap();
    let msrs = stats["exits"]["msrs"].as_array().unwrap();
    let page_msr = msrs.iter().find(|row| row["name"] == "0x40000021").unwrap();
    assert_eq!(page_msr["writes"]["count"], 1);
    let page = lines.iter().find(|l| l["clock"] == "page").unwrap();
    let first = page["first_mark"].as_u64().unwrap();
    let msr_reads = |mark: u64| {
        let name = format!("guest {mark}");
        let marks = stats["marks"].as_array().unwrap();
        let mark = marks.iter().find(|m| m["name"] == name.as_str()).unwrap();
        mark["exits"]["msr_read"].as_u64().unwrap()
    };
    assert_eq!(msr_reads(first), msr_reads(first + 1), "the page was read without exits");
}

#[test]
fn without_the_flag_there_is_no_hyperv() {
    if !kvm_or_skip("without_the_flag_there_is_no_hyperv") {
        return;
    }
    let outcome = boot("guest-clock-cost", &[]);
    assert_eq!(outcome.status, 0, "{}\n{}", outcome.stderr, tail(&outcome.stdout));
    let lines = results(&outcome.stdout);
    assert!(lines.iter().any(|l| l["clock"] == "tsc"), "{}", outcome.stdout);
    assert!(!lines.iter().any(|l| l["clock"] == "msr" || l["clock"] == "page"), "{lines:?}");
}

#[test]
fn a_guest_that_writes_its_tsc_keeps_its_clock() {
    if !kvm_or_skip("a_guest_that_writes_its_tsc_keeps_its_clock") {
        return;
    }
    let outcome = boot("guest-tsc-write", &["--hv-tsc-page", "--cpus", "2"]);
    assert_eq!(outcome.status, 0, "{}\n{}", outcome.stderr, tail(&outcome.stdout));
    let lines = results(&outcome.stdout);
    let checks: Vec<_> = lines.iter().filter(|l| l.get("msr_behind").is_some()).collect();
    assert!(checks.len() >= 2, "{}", outcome.stdout);
    for check in checks {
        assert_eq!(check["msr_behind"], 0, "{check}");
        assert_eq!(check["page_behind"], 0, "{check}");
    }
}

#[test]
fn a_guest_that_floods_every_interface_ends_nothing_but_itself() {
    if !kvm_or_skip("a_guest_that_floods_every_interface_ends_nothing_but_itself") {
        return;
    }
    let outcome = boot("guest-flood", &["--hv-tsc-page", "--cpus", "2", "--timeout", "20"]);
    let shown = format!("{}\n{}", outcome.stderr, tail(&outcome.stdout));
    // It may hit upon an ending; it must not hit upon a bug of ours.
    assert!(
        matches!(outcome.status, 0 | 32 | 33 | 34 | 36 | 37 | 40),
        "{} {shown}",
        outcome.status
    );
    assert!(!outcome.stderr.contains("panicked"), "{shown}");
    assert!(outcome.stderr.lines().count() <= 3, "{shown}");
}
