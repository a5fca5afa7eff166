//! A stock 32-bit Linux guest under our VMM: on this machine's KVM where that can
//! run one, else in the lab.

use guest_tests::experiment::Common;
use guest_tests::host::label;
use guest_tests::progress::Progress;
use guest_tests::results::{self, number, text};
use guest_tests::vm::{LabChoice, linux32_files};
use std::time::Duration;

#[test]
fn a_32_bit_linux_takes_the_page_and_reads_it_without_exits() {
    let common = Common { lab: LabChoice::Auto, vmm_arg: Vec::new() };
    let files = linux32_files(&mut Progress::new(true)).unwrap_or_else(|e| panic!("{e}"));
    let mut vm = common.linux32("32-bit Linux", &files, &["--cpus", "2", "--hv-tsc-page"]);
    vm.timeout = Duration::from_secs(240);
    // A failure carries the console's last lines.
    let ran = vm.run_to_poweroff().unwrap_or_else(|e| panic!("{e}"));
    println!("ran on {} KVM", label(ran.kind));

    let lines = results::parse(&ran.console);
    let chosen = results::select(&lines, "job", "clocksource").next();
    let chosen = chosen.unwrap_or_else(|| panic!("no clocksource:\n{}", ran.console));
    assert_eq!(number(chosen, "bits"), Some(32.0));
    assert_eq!(text(chosen, "current"), Some("hyperv_clocksource_tsc_page"));

    let cost = |clock: &str| {
        let row = results::select(&lines, "job", "clock-cost")
            .find(|line| text(line, "clock") == Some(clock))
            .and_then(|line| number(line, "cycles_p50"));
        row.unwrap_or_else(|| panic!("no row of {clock}:\n{}", ran.console))
    };
    // One costs an exit to user space, the other some arithmetic in the vDSO.
    let (page, hpet) = (cost("hyperv_clocksource_tsc_page"), cost("hpet"));
    assert!(page * 10.0 < hpet, "page {page} cycles, HPET {hpet}");

    let msrs = ran.stats["exits"]["msrs"].as_array().expect("statistics");
    let count = |msr: &str, direction: &str| {
        let row = msrs.iter().find(|row| row["name"] == msr);
        row.map_or(0, |row| row[direction]["count"].as_u64().expect("a count"))
    };
    assert_eq!(count("0x40000021", "writes"), 1);
    assert_eq!(count("0x40000020", "reads"), 0);
}
