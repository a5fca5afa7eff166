//! Bare-metal guests on the lab's KVM: SVM, where the guest's TSC has an offset
//! of its own. This is the second tier where /dev/kvm is absent, and a second
//! kind of KVM where it is not.

use guest_tests::lab::{Lab, Output};
use guest_tests::results::{self, Result as Line, number};
use guest_tests::vm::sibling;
use std::time::Duration;

/// Runs one shell script in the lab with these guest programs beside it.
fn in_lab(guests: &[&str], script: &str) -> Output {
    let mut lab = Lab::new(script);
    lab.timeout = Duration::from_secs(400);
    lab.files = guests
        .iter()
        .map(|name| ((*name).to_owned(), sibling(name).expect("guests are built")))
        .collect();
    lab.run().unwrap_or_else(|e| panic!("{e}"))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn every_ending_has_its_code() {
    let ends = [
        ("power-off", "", 0),
        ("reset", "", 32),
        ("reboot", "", 40),
        ("triple-fault", "", 33),
        ("halt", "--timeout 1", 36),
        ("spin", "--timeout 1 --cpus 2", 36),
        ("emulation-failure", "", 37),
    ];
    let script: String = ends
        .iter()
        .map(|(how, flags, _)| {
            format!("vmm -k guest-end --cmdline how={how} {flags} >/dev/null; echo {how}=$?\n")
        })
        .collect();
    let output = in_lab(&["guest-end"], &script);
    let stdout = text(&output.stdout);
    for (how, _, code) in ends {
        let expected = format!("{how}={code}");
        assert!(
            stdout.lines().any(|l| l == expected),
            "{expected}: {stdout}\n{}",
            text(&output.stderr)
        );
    }
}

fn agrees(lines: &[Line], guest: &str) {
    let checks: Vec<_> = results::select(lines, "guest", guest)
        .filter(|line| line.contains_key("msr_behind"))
        .collect();
    assert!(!checks.is_empty(), "{guest} checked nothing: {lines:?}");
    for check in checks {
        for count in ["msr_behind", "page_behind", "invalid"] {
            assert_eq!(number(check, count), Some(0.0), "{check:?}");
        }
        assert!(number(check, "pairs") >= Some(100.0), "{check:?}");
    }
}

#[test]
fn page_and_counter_agree_even_when_the_guest_writes_its_tsc() {
    let output = in_lab(
        &["guest-clock-cost", "guest-tsc-write"],
        "vmm -k guest-clock-cost --cpus 2 --hv-tsc-page --cmdline 'reads=20 batches=10' && \
         vmm -k guest-tsc-write --cpus 2 --hv-tsc-page",
    );
    let stdout = text(&output.stdout);
    assert_eq!(output.status, 0, "{stdout}\n{}", text(&output.stderr));
    let lines = results::parse(&stdout);
    agrees(&lines, "clock-cost");
    agrees(&lines, "tsc-write");
}
