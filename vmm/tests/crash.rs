//! A defect of ours in one thread ends the process, with a line and a code.

mod common;

use common::run;
use std::process::Command;
use std::time::Duration;

const PART: &str = "VMM_CRASH_TEST_PART";

/// The dying half: does nothing unless the test below runs it.
#[test]
fn dying_half() {
    let Ok(part) = std::env::var(PART) else { return };
    vmm::crash::prepare();
    let thread = std::thread::Builder::new().name("vcpu7".into()).spawn(move || {
        match part.as_str() {
            "panic" => panic!("first line\nsecond line"),
            // SAFETY: raises a signal in this thread.
            _ => unsafe { libc::raise(libc::SIGBUS) },
        };
    });
    thread.expect("a thread").join().expect("unreachable");
    // A thread that died alone would let the process come here, and pass.
}

#[test]
fn a_thread_takes_the_process_with_it() {
    let myself = std::env::current_exe().expect("path of the test");
    for (part, says) in [("panic", "first line second line"), ("signal", "SIGBUS")] {
        let mut command = Command::new(&myself);
        command.args(["--exact", "dying_half", "--nocapture"]).env(PART, part);
        let outcome = run(command.env_remove("RUST_BACKTRACE"), Duration::from_secs(20));
        assert_eq!(outcome.status, 38, "{outcome:?}");
        assert_eq!(outcome.stderr.lines().count(), 1, "{outcome:?}");
        assert!(outcome.stderr.contains(says), "{outcome:?}");
        assert!(part != "panic" || outcome.stderr.contains("vcpu7"), "{outcome:?}");
    }
}
