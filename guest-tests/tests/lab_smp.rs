//! A stock kernel on several vCPUs: all of them come up, and it has nothing to
//! complain of.

use guest_tests::experiment::{Common, linux_files};
use guest_tests::results;
use guest_tests::vm::LabChoice;

fn all_cpus_come_up(cpus: u32, words: &str, arguments: &[&str]) {
    let common = Common { lab: LabChoice::Auto, vmm_arg: Vec::new() };
    let files = linux_files().unwrap_or_else(|e| panic!("{e}"));
    let count = cpus.to_string();
    let arguments = [&["--cpus", &count, "--hv-tsc-page"], arguments].concat();
    let jobs = "clocksource,dmesg,poweroff";
    let vm = common.linux_with(words, jobs, words, &files, &arguments);
    let ran = vm.run_to_poweroff().unwrap_or_else(|e| panic!("{e}"));
    let lines = results::parse(&ran.console);
    let clocks = results::select(&lines, "job", "clocksource").next().expect("a clocksource line");
    assert_eq!(results::number(clocks, "cpus"), Some(f64::from(cpus)), "{}", ran.console);
    assert_eq!(results::text(clocks, "current"), Some("hyperv_clocksource_tsc_page"));
    let defects: Vec<_> = lines.iter().filter_map(|line| line.get("text")).collect();
    assert!(defects.is_empty(), "{defects:?}");
}

#[test]
fn lab_eight_cpus_in_two_sockets_come_up() {
    all_cpus_come_up(8, "", &["--topology", "sockets=2,cores=2,threads=2"]);
}

#[test]
fn lab_a_guest_without_x2apic_gets_its_cpus() {
    all_cpus_come_up(4, "nox2apic", &[]);
}
