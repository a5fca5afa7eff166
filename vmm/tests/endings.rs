//! Signals end the process at once, whenever they come.

mod common;

use common::{guest, kvm_or_skip, vmm, wait};
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// From the signal to the end of the process. The promise is one second on a
/// machine with a CPU to spare, and the test allows for a busy one.
const AT_ONCE: Duration = Duration::from_secs(1);
const BUSY_FACTOR: u32 = 5;

const SIGNALS: [i32; 3] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP];

fn machine(how: &str, cpus: &str) -> Command {
    let mut command = vmm();
    command.arg("--kernel").arg(guest("guest-end"));
    command.args(["--cpus", cpus, "--cmdline", &format!("how={how}")]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Sends the signal and waits for the end, which must be prompt and documented.
fn end(child: &mut Child, number: i32, when: &str) -> Duration {
    let sent = Instant::now();
    // SAFETY: our own child, not yet waited for.
    assert_eq!(unsafe { libc::kill(child.id() as i32, number) }, 0);
    let code = wait(child, AT_ONCE * BUSY_FACTOR);
    assert_eq!(code, Some(128 + number), "signal {number} {when}");
    sent.elapsed()
}

fn wait_for_guest(child: &mut Child) {
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().expect("piped")).read_line(&mut line).expect("a line");
    assert!(line.contains("@result"), "{line}");
}

#[test]
fn a_spinning_and_a_halted_guest_end_at_once() {
    if !kvm_or_skip("a_spinning_and_a_halted_guest_end_at_once") {
        return;
    }
    for how in ["spin", "halt"] {
        for number in SIGNALS {
            let mut child = machine(how, "2").spawn().expect("the binary starts");
            wait_for_guest(&mut child);
            end(&mut child, number, how);
        }
    }
}

#[test]
fn before_the_boot() {
    let mut child = machine("spin", "1").spawn().expect("the binary starts");
    end(&mut child, libc::SIGTERM, "right after exec");
    if !kvm_or_skip("before_the_boot") {
        return;
    }
    for number in SIGNALS {
        // Touching 2 GiB takes long enough to be hit.
        let mut command = machine("spin", "1");
        let mut child = command.args(["--memory", "2G", "--prefault"]).spawn().expect("starts");
        // The process has its handlers once it has opened /dev/kvm.
        let fds = format!("/proc/{}/fd", child.id());
        let opened = || {
            let mut links = std::fs::read_dir(&fds).into_iter().flatten().flatten();
            links.any(|fd| std::fs::read_link(fd.path()).is_ok_and(|to| to.ends_with("kvm")))
        };
        while !opened() {
            assert!(child.try_wait().expect("our child").is_none(), "over before it was ready");
            std::thread::yield_now();
        }
        end(&mut child, number, "while memory is prepared");
    }
}

/// Moments spread over the whole life of a machine, from exec to long after the
/// guest's first word, by a generator with a fixed seed.
#[test]
fn two_hundred_signals_at_random_moments() {
    if !kvm_or_skip("two_hundred_signals_at_random_moments") {
        return;
    }
    let mut random = 0x2545_f491_4f6c_dd1d_u64;
    let (mut slowest, mut total) = ((Duration::ZERO, 0, "", 0), Duration::ZERO);
    for round in 0..200 {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let how = ["spin", "halt"][round % 2];
        let mut child = machine(how, ["1", "2"][round / 2 % 2]).spawn().expect("starts");
        // This pause is the experiment, not a wait.
        std::thread::sleep(Duration::from_micros(random % 100_000));
        let took = end(&mut child, libc::SIGTERM, &format!("in round {round} ({how})"));
        slowest = slowest.max((took, round, how, random % 100_000));
        total += took;
    }
    println!(
        "200 SIGTERMs: mean {:?}, slowest {slowest:?} (round, guest, µs after the start)",
        total / 200
    );
}

#[test]
fn a_blocked_stdout_holds_up_no_end() {
    if !kvm_or_skip("a_blocked_stdout_holds_up_no_end") {
        return;
    }
    // More than the pipe holds; nobody reads it.
    let mut command = machine("halt talk=100000", "1");
    let mut child = command.spawn().expect("the binary starts");
    let status = format!("/proc/{}/task", child.id());
    // The console thread sleeps in pipe_write once the pipe is full.
    let blocked = || {
        let mut tasks = std::fs::read_dir(&status).into_iter().flatten().flatten();
        tasks.any(|task| {
            std::fs::read_to_string(task.path().join("wchan")).is_ok_and(|w| w.contains("pipe_w"))
        })
    };
    let deadline = Instant::now() + Duration::from_secs(20);
    while !blocked() && Instant::now() < deadline {
        std::thread::yield_now();
    }
    assert!(blocked());
    end(&mut child, libc::SIGTERM, "with stdout blocked");
}
