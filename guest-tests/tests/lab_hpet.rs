//! A stock Linux guest and the HPET.

use guest_tests::experiment::{Common, linux_files, run_all};
use guest_tests::results::{self, Result as Line, number, text};
use guest_tests::vm::{LabChoice, Outcome, Vm};

/// A Linux guest that runs `jobs`; its kernel gets `words`.
fn linux(jobs: &str, words: &str, arguments: &[&str]) -> Vm {
    let common = Common { lab: LabChoice::Auto, vmm_arg: Vec::new() };
    let files = linux_files().unwrap_or_else(|e| panic!("{e}"));
    common.linux_with(jobs, jobs, words, &files, arguments)
}

fn line(ran: &Outcome, job: &str) -> Line {
    let lines = results::parse(&ran.console);
    let found = results::select(&lines, "job", job).next().cloned();
    found.unwrap_or_else(|| panic!("no {job}:\n{}\n{}", ran.console, ran.stderr))
}

/// CONFIG_HZ of Debian's kernels.
const CONFIG_HZ: f64 = 250.0;

#[test]
fn linux_ticks_at_its_rate_with_the_hpet_as_its_only_clockevent() {
    let vm = linux("ticks:10,poweroff", "nolapic_timer highres=off nohz=off", &["--hv-tsc-page"]);
    // A tick is lost where this machine does not run the guest for 4 ms; that it is busy with
    // something else says nothing about the HPET.
    let mut rates = Vec::new();
    for _ in 0..3 {
        let ran = vm.run_to_poweroff().unwrap_or_else(|e| panic!("{e}"));
        let ticks = line(&ran, "ticks");
        assert_eq!(text(&ticks, "clock_event"), Some("hpet"), "{ticks:?}");
        let rate = number(&ticks, "ticks_per_s").expect("a rate");
        assert!(rate <= CONFIG_HZ * 1.01, "{ticks:?}");
        if rate >= CONFIG_HZ * 0.99 {
            return;
        }
        rates.push(rate);
    }
    panic!("{rates:?} ticks/s");
}

#[test]
fn an_idle_linux_leaves_the_hpet_alone() {
    let ran = linux("ticks:10,poweroff", "", &["--hv-tsc-page"]).run_to_poweroff();
    let ran = ran.unwrap_or_else(|e| panic!("{e}"));
    let ticks = line(&ran, "ticks");
    assert_ne!(text(&ticks, "clock_event"), Some("hpet"), "{ticks:?}");
    assert_eq!(number(&ticks, "ticks"), Some(0.0), "{ticks:?}");
    let marks = ran.stats["marks"].as_array().expect("marks");
    let exits = |name: &str, reason: &str| {
        let mark = marks.iter().find(|mark| mark["name"] == name).expect("a mark");
        mark["exits"][reason].as_u64().expect("a count")
    };
    // The HPET alone is on the memory bus.
    for reason in ["mmio_read", "mmio_write"] {
        assert_eq!(exits("guest 1", reason), exits("guest 0", reason), "{reason}");
    }
}

#[test]
fn all_cpus_of_linux_read_the_hpet_and_time_never_goes_back() {
    const JOBS: &str = "clocksource,contend:2,dmesg,poweroff";
    const WORDS: &str = "clocksource=hpet";
    let vm = |mode| linux(JOBS, WORDS, &["--hpet", mode, "--cpus", "2"]);
    let (mut modes, mut vms) = (vec!["exit"], vec![vm("exit")]);
    if vms[0].in_lab {
        println!("SKIPPED --hpet page: the lab has one CPU, and hpet-page needs one of its own");
    } else {
        modes.push("page");
        vms.push(vm("page"));
    }
    let outcomes = run_all(&vms).unwrap_or_else(|e| panic!("{e}"));
    for (mode, ran) in modes.iter().zip(&outcomes) {
        assert_eq!(text(&line(ran, "clocksource"), "current"), Some("hpet"), "{mode}");
        let contend = line(ran, "contend");
        assert_eq!(number(&contend, "cpus"), Some(2.0), "{contend:?}");
        assert_eq!(number(&contend, "backward"), Some(0.0), "{mode}: {contend:?}");
        assert_eq!(number(&contend, "backward_between_cpus"), Some(0.0), "{mode}: {contend:?}");
        let reads = number(&contend, "reads").expect("reads");
        assert!(reads >= 100.0, "{mode}: {contend:?}");
        let lines = results::parse(&ran.console);
        let defects: Vec<_> = results::select(&lines, "job", "dmesg")
            .filter(|line| line.contains_key("defect"))
            // Of AMD processors without an invariant TSC, as the lab's, Linux expects nothing else.
            .filter(|line| text(line, "defect") != Some("Marking TSC unstable"))
            .collect();
        assert!(defects.is_empty(), "{mode}: {defects:?}");
        let rows = ran.stats["exits"]["mmio"].as_array().expect("rows");
        let hpet = rows.iter().find(|row| row["name"] == "hpet").expect("the HPET");
        let exits = hpet["reads"]["count"].as_u64().expect("a count");
        if *mode == "page" {
            assert_eq!(exits, 0, "a read of the page is no exit");
            assert!(
                ran.stats["hpet"]["page"]["stores"].as_u64() > Some(0),
                "{}",
                ran.stats["hpet"]
            );
        } else {
            assert!(exits as f64 >= reads / 2.0, "{exits} exits for {reads} reads");
        }
    }
}
