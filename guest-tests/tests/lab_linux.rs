//! A stock Linux guest under our VMM: on this machine's KVM where that can run
//! one, else in the lab.

use guest_tests::experiment::{Common, linux_files};
use guest_tests::host::label;
use guest_tests::results::{self, text};
use guest_tests::vm::{LabChoice, Outcome, Vm};

fn linux(jobs: &str, arguments: &[&str]) -> Vm {
    let common = Common { lab: LabChoice::Auto, vmm_arg: Vec::new() };
    let files = linux_files().unwrap_or_else(|e| panic!("{e}"));
    common.linux(jobs, jobs, &files, arguments)
}

fn run(vm: &Vm) -> Outcome {
    let ran = vm.run().unwrap_or_else(|e| panic!("{e}"));
    println!("ran on {} KVM", label(ran.kind));
    ran
}

/// The field `key` of the first line of `job`.
fn field(ran: &Outcome, job: &str, key: &str) -> String {
    let lines = results::parse(&ran.console);
    let found = results::select(&lines, "job", job).find_map(|line| text(line, key));
    found.unwrap_or_else(|| panic!("no {key} of {job}:\n{}", ran.console)).to_owned()
}

fn msr_count(ran: &Outcome, msr: &str, direction: &str) -> u64 {
    let msrs = ran.stats["exits"]["msrs"].as_array().expect("statistics");
    msrs.iter()
        .find(|row| row["name"] == msr)
        .map_or(0, |row| row[direction]["count"].as_u64().expect("a count"))
}

#[test]
fn linux_takes_the_page_and_complains_of_nothing() {
    let ran = run(&linux("clocksource,dmesg,poweroff", &["--cpus", "2", "--hv-tsc-page"]));
    assert_eq!(ran.status, 0, "{}\n{}", ran.console, ran.stderr);
    assert_eq!(field(&ran, "clocksource", "current"), "hyperv_clocksource_tsc_page");
    let lines = results::parse(&ran.console);
    let defects: Vec<_> = results::select(&lines, "job", "dmesg")
        .filter(|line| line.contains_key("defect"))
        .collect();
    assert!(defects.is_empty(), "{defects:?}");
    assert!(results::select(&lines, "job", "dmesg").next().is_some(), "{}", ran.console);
    assert_eq!(msr_count(&ran, "0x40000021", "writes"), 1);
    assert_eq!(msr_count(&ran, "0x40000020", "reads"), 0);
}

#[test]
fn without_the_page_linux_reads_the_counter() {
    let ran = run(&linux("clocksource,poweroff", &["--hv-ref-counter"]));
    assert_eq!(ran.status, 0, "{}\n{}", ran.console, ran.stderr);
    assert_eq!(field(&ran, "clocksource", "current"), "hyperv_clocksource_msr");
    assert!(msr_count(&ran, "0x40000020", "reads") > 0);
}

#[test]
fn a_default_boot_shows_kvm_and_no_hyperv() {
    let ran = run(&linux("dmesg:match:Hypervisor,reboot", &[]));
    assert_eq!(ran.status, 32, "{}\n{}", ran.console, ran.stderr);
    assert!(ran.console.contains("Hypervisor detected: KVM"), "{}", ran.console);
}

#[test]
fn a_panic_has_a_code_of_its_own() {
    let ran = run(&linux("crash", &["--timeout", "200"]));
    // pvpanic where the kernel has its driver; else panic=-1 asks for a reset.
    assert!(matches!(ran.status, 32 | 34), "{}: {}\n{}", ran.status, ran.console, ran.stderr);
    assert!(ran.console.contains("Kernel panic"), "{}", ran.console);
}
