//! A stock kernel on several vCPUs: all of them come up, and it has nothing to
//! complain of.

use guest_tests::experiment::{Common, linux_files};
use guest_tests::results;
use guest_tests::vm::LabChoice;
use std::time::Duration;

fn all_cpus_come_up(cpus: u32, words: &str, arguments: &[&str]) {
    let common = Common { lab: LabChoice::Auto, vmm_arg: Vec::new() };
    let files = linux_files().unwrap_or_else(|e| panic!("{e}"));
    let count = cpus.to_string();
    let arguments = [&["--cpus", &count, "--hv-tsc-page"], arguments].concat();
    let jobs = "clocksource,dmesg,poweroff";
    let mut vm = common.linux_with(words, jobs, words, &files, &arguments);
    // An emulated CPU takes its turns with all of them.
    vm.timeout = Duration::from_secs(300 + 15 * u64::from(cpus));
    let ran = vm.run_to_poweroff().unwrap_or_else(|e| panic!("{e}"));
    let lines = results::parse(&ran.console);
    let clocks = results::select(&lines, "job", "clocksource").next().expect("a clocksource line");
    assert_eq!(results::number(clocks, "cpus"), Some(f64::from(cpus)), "{}", ran.console);
    assert_eq!(results::text(clocks, "current"), Some("hyperv_clocksource_tsc_page"));
    if arguments.contains(&"--hv-stimer") {
        let devices = vec!["Hyper-V clockevent"; cpus as usize];
        assert_eq!(clocks["clockevents"], serde_json::json!(devices));
    }
    let defects: Vec<_> = lines.iter().filter_map(|line| line.get("text")).collect();
    assert!(defects.is_empty(), "{defects:?}");
}

#[test]
fn lab_eight_cpus_in_two_sockets_come_up() {
    all_cpus_come_up(8, "", &["--topology", "sockets=2,cores=2,threads=2"]);
}

/// `SMP_CPUS=1,2,8,39,40,41,64` is the whole sweep.
#[test]
fn lab_forty_cpus_come_up_on_synthetic_timers() {
    let sizes = std::env::var("SMP_CPUS").unwrap_or_else(|_| "40".into());
    for cpus in sizes.split(',') {
        let cpus = cpus.parse().expect("SMP_CPUS: numbers of CPUs");
        all_cpus_come_up(cpus, "", &["--hv-stimer"]);
        println!("{cpus} CPUs up");
    }
}

#[test]
fn lab_a_guest_without_x2apic_gets_its_cpus() {
    all_cpus_come_up(4, "nox2apic", &[]);
}
