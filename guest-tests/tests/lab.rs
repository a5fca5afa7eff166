//! The lab itself: a command runs beside a KVM that works, and all that it says
//! and leaves comes back unchanged.

#![allow(clippy::unwrap_used)] // a failed unwrap is a failed test

use guest_tests::lab::{Lab, LabError};
use std::io::Write;
use std::time::Duration;

fn lab(command: &str) -> Lab {
    let mut lab = Lab::new(command);
    // What is tested here is the lab, not what usually runs in it.
    lab.files.push(("vmm".into(), "/bin/true".into()));
    lab.timeout = Duration::from_secs(120);
    lab
}

#[test]
fn status_output_and_files_come_back_unchanged() {
    let mut input = tempfile::NamedTempFile::new().unwrap();
    let bytes: Vec<u8> = (0..=u8::MAX).cycle().take(100_000).collect();
    input.write_all(&bytes).unwrap();

    let mut lab =
        lab("/init kvm-probe && cat input && printf oops >&2 && cp input out/copy; exit 33");
    lab.files.push(("input".into(), input.path().to_owned()));
    let output = lab.run().unwrap();

    assert_eq!(output.status, 33);
    assert_eq!(output.stderr, b"oops");
    let probe = b"@result {\"job\":\"kvm-probe\",\"api_version\":12}\n";
    let (said, rest) = output.stdout.split_at(probe.len());
    assert_eq!(said, probe);
    assert!(rest == bytes, "{} bytes of standard output differ", rest.len());
    assert_eq!(output.files.len(), 1);
    assert_eq!(output.files[0].0, "copy");
    assert!(output.files[0].1 == bytes, "the file's bytes differ");
}

#[test]
fn a_machine_that_ends_early_shows_its_console() {
    match lab("poweroff -f; sleep 100").run() {
        Err(LabError::Ended { step, tail }) => {
            assert_eq!(step, "running the command in the lab");
            assert!(tail.contains("Power down"), "{tail}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_command_that_does_not_end_is_stopped_at_the_timeout() {
    let mut lab = lab("echo waiting; sleep 1000");
    lab.timeout = Duration::from_secs(30);
    match lab.run() {
        Err(LabError::Timeout { seconds: 30, tail, .. }) => {
            assert!(tail.contains("waiting"), "{tail}");
        }
        other => panic!("{other:?}"),
    }
}
