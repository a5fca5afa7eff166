//! Page, MSR and HPET never go back, shortened from `clocklab nmi-storm`, `clocklab
//! order` and `clocklab drift`: each test says how much it did.

#![allow(clippy::unwrap_used)] // a failed unwrap is a failed test

use guest_tests::experiment::{Common, drift, nmi_storm, order};
use guest_tests::report::Report;
use guest_tests::vm::LabChoice;

/// Bare-metal guests on this machine's KVM, or the reason why there are none.
fn here(test: &str) -> Option<Common> {
    match vmm::host::open_kvm() {
        Ok(_) => Some(Common { lab: LabChoice::Never, vmm_arg: Vec::new() }),
        Err(e) => {
            println!("SKIPPED {test}: {e}");
            None
        }
    }
}

fn counts(report: &Report, row: usize, keys: &[&str]) -> Vec<u64> {
    keys.iter().map(|key| report.rows[row][key].as_u64().expect(key)).collect()
}

#[test]
fn an_nmi_handler_reads_no_earlier_time_than_what_it_interrupts() {
    let Some(common) = here("nmi-storm") else { return };
    let options = nmi_storm::Options { seconds: 3, reads_per_nmi: 65536 };
    let report = nmi_storm::run(&common, &options).unwrap();
    let keys = ["nmis", "nmi_reads", "main_reads", "republications", "backward"];
    let [nmis, nmi_reads, main_reads, republications, backward] =
        counts(&report, 0, &keys).try_into().unwrap();
    println!(
        "{nmi_reads} reads in {nmis} NMIs, {main_reads} by the interrupted code, \
         {republications} republications: {backward} backward"
    );
    assert_eq!(backward, 0);
    assert!(nmis > 50 && nmi_reads > 100_000 && main_reads > 100_000, "too little of a storm");
    assert!(republications > 3 * 1000, "not 1000 a second");
}

#[test]
fn a_clock_read_on_one_vcpu_is_not_behind_what_another_read() {
    let Some(common) = here("order") else { return };
    let options = order::Options { hops: 20_000, cpus: 2, mix: Vec::new(), undisturbed: false };
    let report = order::run(&common, &options).unwrap();
    assert_eq!(report.rows.len(), 4);
    for row in 0..4 {
        let keys = ["hops", "changes", "backward"];
        let [hops, changes, backward] = counts(&report, row, &keys).try_into().unwrap();
        let seconds = report.rows[row]["seconds"].as_f64().unwrap();
        let mix = &report.rows[row]["mix"];
        println!("{mix}: {hops} hops, {changes} changes in {seconds:.1} s: {backward} backward");
        assert_eq!((hops, backward), (20_000, 0));
        assert!(changes as f64 > 1000.0 * seconds, "not 1000 changes a second");
    }
    assert_eq!(report.rows[3]["hpet_apart"], 0);
}

#[test]
fn guest_clocks_keep_the_hosts_pace() {
    let Some(common) = here("drift") else { return };
    let options = drift::Options { minutes: 0.2, load: vec![drift::Load::Idle] };
    let report = drift::run(&common, &options).unwrap();
    assert_eq!(report.rows.len(), 5);
    for row in &report.rows {
        let field = |key: &str| row[key].as_f64().unwrap();
        let (ppm, uncertainty) = (field("ppm"), field("uncertainty_ppm"));
        println!("{}: {ppm:.3} ppm ± {uncertainty:.3}, {} samples", row["clock"], row["samples"]);
        // The rate may differ by 0.5 ppm; 12 s show it no finer than the brackets are wide.
        assert!(ppm.abs() < 0.5 + uncertainty, "{row}");
        assert!(uncertainty < 200.0, "{row}");
    }
}
