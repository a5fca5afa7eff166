//! Any number of vCPUs: each comes up through INIT and SIPI with an id of its
//! own, or one line says which limit stands in the way.

mod common;

use common::{Outcome, guest, kvm_or_skip, results, run, tail, vmm};
use kvm_ioctls::Kvm;
use std::time::Duration;

/// A thousand vCPUs that take turns on a few busy CPUs need a while.
const LIMIT: Duration = Duration::from_secs(180);

/// Boots the counting guest on so many vCPUs, with memory for their stacks.
fn count(cpus: u32, words: &str, arguments: &[&str]) -> Outcome {
    let memory = format!("{}M", 32 + cpus / 16);
    let cmdline = format!("cpus={cpus} {words}");
    let mut vmm = vmm();
    vmm.arg("--kernel").arg(guest("guest-smp")).args(["--memory", &memory]);
    run(vmm.args(["--cmdline", &cmdline]).args(arguments), LIMIT)
}

fn all_came(outcome: &Outcome, cpus: u32, highest_id: u32) {
    let shown = format!("{cpus} vCPUs: {}\n{}", outcome.stderr, tail(&outcome.stdout));
    assert_eq!(outcome.status, 0, "{shown}");
    let results = results(&outcome.stdout);
    let result = results.first().unwrap_or_else(|| panic!("no result: {shown}"));
    assert_eq!(result["cpus"], cpus, "{shown}");
    assert_eq!(result["highest_id"], highest_id, "{shown}");
    for defect in ["duplicate_ids", "ids_out_of_range", "cpuid_mismatches"] {
        assert_eq!(result[defect], 0, "{shown}");
    }
}

fn refused(outcome: &Outcome, names: &[&str]) {
    assert_eq!(outcome.status, 35, "{outcome:?}");
    assert_eq!(outcome.stderr.lines().count(), 1, "{outcome:?}");
    for name in names {
        assert!(outcome.stderr.contains(name), "{outcome:?}");
    }
}

#[test]
fn every_vcpu_comes_up_with_an_id_of_its_own() {
    if !kvm_or_skip("every_vcpu_comes_up_with_an_id_of_its_own") {
        return;
    }
    let most = Kvm::new().expect("opened before").get_max_vcpus() as u32;
    for cpus in [1, 2, 8, 39, 40, 41, 64, 254, 255, 256, 1024] {
        let argument = cpus.to_string();
        let outcome = count(cpus, "apic=x2apic", &["--cpus", &argument]);
        if cpus <= most {
            all_came(&outcome, cpus, cpus - 1);
        } else {
            refused(&outcome, &["--cpus", &argument, &most.to_string(), "KVM_CAP_MAX_VCPUS"]);
        }
    }
}

#[test]
fn xapic_reaches_what_its_ids_can_name() {
    if !kvm_or_skip("xapic_reaches_what_its_ids_can_name") {
        return;
    }
    for cpus in [2, 40, 255] {
        let outcome = count(cpus, "apic=xapic", &["--cpus", &cpus.to_string()]);
        all_came(&outcome, cpus, cpus - 1);
    }
}

#[test]
fn a_topology_is_in_the_ids() {
    if !kvm_or_skip("a_topology_is_in_the_ids") {
        return;
    }
    // Fields of 1 bit for threads, 3 for cores: socket 2, core 4, thread 1.
    let outcome = count(30, "", &["--topology", "sockets=3,cores=5,threads=2"]);
    all_came(&outcome, 30, 2 << 4 | 4 << 1 | 1);
    let outcome = count(192, "", &["--topology", "sockets=64,cores=3", "--cpus", "192"]);
    all_came(&outcome, 192, 63 << 2 | 2);
    // Gaps push the last id past what 8 bits hold, though there are 252 vCPUs.
    let outcome = count(252, "", &["--topology", "sockets=84,cores=3"]);
    all_came(&outcome, 252, 83 << 2 | 2);
}

#[test]
fn impossible_numbers_are_one_line() {
    for (arguments, names) in [
        (&["--cpus", "0"][..], &["--cpus 0"][..]),
        (&["--cpus", "4", "--topology", "cores=5"], &["--cpus 4", "--topology", "makes 5"]),
        (&["--topology", "dies=2"], &["--topology", "sockets=S"]),
        (&["--topology", "cores=0"], &["--topology", "from 1"]),
    ] {
        refused(&count(1, "", arguments), names);
    }
    if !kvm_or_skip("impossible_numbers_are_one_line (those that depend on the host)") {
        return;
    }
    for arguments in [["--cpus", "1000000"], ["--topology", "sockets=1024,cores=1024,threads=9"]] {
        refused(&count(1, "", &arguments), &["--cpus", "the most here is"]);
    }
}

#[test]
fn the_boot_timer_names_each_step_once_in_order() {
    if !kvm_or_skip("the_boot_timer_names_each_step_once_in_order") {
        return;
    }
    let outcome = count(3, "", &["--cpus", "3", "--boot-timer"]);
    all_came(&outcome, 3, 2);
    let rows: Vec<(f64, &str)> = outcome
        .stderr
        .lines()
        .skip(1)
        .map(|line| {
            let (figures, name) = line.split_at(28);
            let ms = figures.split_whitespace().nth(1).and_then(|ms| ms.parse().ok());
            (ms.unwrap_or_else(|| panic!("no time: {line}")), name.trim())
        })
        .collect();
    assert!(rows.is_sorted_by_key(|row| row.0), "{rows:?}");
    let steps = ["kvm ready", "memory", "kernel loaded", "vcpus ready", "vcpu 0 enters"];
    assert_eq!(rows.iter().take(5).map(|row| row.1).collect::<Vec<_>>(), steps);
    for once in ["last vcpu enters", "first console byte"] {
        assert_eq!(rows.iter().filter(|row| row.1 == once).count(), 1, "{rows:?}");
    }
    assert!(rows[0].0 > 0.0);
}
