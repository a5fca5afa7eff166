//! Every thread is confined while the guest runs, and a call that is not on its
//! list ends the process with a line.

mod common;
#[path = "common/control.rs"]
mod control;
#[path = "common/pty.rs"]
mod pty;

use common::{guest, kvm_or_skip, run, vmm, wait};
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::Duration;

const PART: &str = "VMM_SECCOMP_TEST_PART";

/// The seccomp mode of each thread of a machine with all kinds of threads.
fn modes(arguments: &[&str]) -> Vec<(String, String)> {
    let mut command = vmm();
    command.arg("--kernel").arg(guest("guest-end")).args(["--cmdline", "how=halt"]);
    command.args(["--cpus", "2", "--hv-stimer", "--hpet", "page", "--timeout", "20"]);
    let child = command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
    let mut child = child.expect("the binary starts");
    let mut line = String::new();
    let stdout = child.stdout.take().expect("piped");
    BufReader::new(stdout).read_line(&mut line).expect("a line");
    assert!(line.contains("@result"), "{line}");
    let tasks = std::fs::read_dir(format!("/proc/{}/task", child.id())).expect("a process");
    let modes = tasks
        .map(|task| {
            let status = std::fs::read_to_string(task.expect("a task").path().join("status"));
            let status = status.expect("a thread that lives as long as the machine");
            let field = |name: &str| {
                let value = status.lines().find_map(|line| line.strip_prefix(name));
                value.expect("a field of the kernel's").trim().to_owned()
            };
            (field("Name:"), field("Seccomp:"))
        })
        .collect();
    let _ = child.kill();
    let _ = child.wait();
    modes
}

#[test]
fn every_thread_is_confined_unless_told_otherwise() {
    if !kvm_or_skip("every_thread_is_confined_unless_told_otherwise") {
        return;
    }
    let threads = modes(&[]);
    for name in ["vmm", "vcpu0", "vcpu1", "console", "hpet-page", "hk-"] {
        assert!(threads.iter().any(|(thread, _)| thread.starts_with(name)), "{name}: {threads:?}");
    }
    assert!(threads.iter().all(|(_, mode)| mode == "2"), "{threads:?}");
    let threads = modes(&["--no-seccomp"]);
    assert!(threads.iter().all(|(_, mode)| mode == "0"), "{threads:?}");
}

/// The confined half: does nothing unless the test below runs it.
#[test]
fn confined_half() {
    let Ok(part) = std::env::var(PART) else { return };
    vmm::crash::prepare();
    vmm::seccomp::turn_on().expect("filters");
    std::thread::spawn(move || {
        vmm::seccomp::enter(vmm::seccomp::Thread::Vcpu);
        let null = std::ptr::null_mut();
        // SAFETY: none of these calls touches this program's memory: mmap makes a
        // new mapping, the ioctl and kill are refused before they do anything.
        unsafe {
            match part.as_str() {
                "allowed" => {
                    libc::getpid();
                }
                "socket" => {
                    libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0);
                }
                "open" => {
                    libc::open(c"/dev/null".as_ptr(), libc::O_RDONLY);
                }
                "execve" => {
                    libc::execv(c"/bin/true".as_ptr(), std::ptr::null());
                }
                "ioctl" => {
                    libc::ioctl(0, libc::TIOCSTI, c"x".as_ptr());
                }
                "kill" => {
                    libc::kill(1, 0);
                }
                _ => {
                    let code = libc::PROT_READ | libc::PROT_EXEC;
                    let private = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
                    libc::mmap(null, 4096, code, private, -1, 0);
                }
            }
        }
    })
    .join()
    .expect("unreachable where the call is not allowed");
}

#[test]
fn what_a_vcpu_must_not_do_ends_the_process() {
    let myself = std::env::current_exe().expect("path of the test");
    for (part, code, number) in [
        ("allowed", 0, 0),
        ("socket", 38, libc::SYS_socket),
        ("open", 38, libc::SYS_openat),
        ("execve", 38, libc::SYS_execve),
        ("ioctl", 38, libc::SYS_ioctl),
        ("kill", 38, libc::SYS_kill),
        ("mmap", 38, libc::SYS_mmap),
    ] {
        let mut command = Command::new(&myself);
        command.args(["--exact", "confined_half", "--nocapture"]).env(PART, part);
        let outcome = run(&mut command, Duration::from_secs(20));
        assert_eq!(outcome.status, code, "{part}: {outcome:?}");
        let says = format!("system call {number};");
        assert!(code == 0 || outcome.stderr.contains(&says), "{part}: {outcome:?}");
    }
}

/// Whatever threads a machine has, none calls what its list leaves out: the guest's
/// own ending is the process's.
#[test]
fn every_kind_of_machine_lives_within_its_lists() {
    if !kvm_or_skip("every_kind_of_machine_lives_within_its_lists") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let path = |name: &str| directory.path().join(name).display().to_string();
    let (stats, log, control) = (path("stats"), format!("file={}", path("log")), path("control"));
    let own = vmm::pinning::allowed_cpus().0[0].to_string();
    let second = format!("1={own}");

    const TIMER: &str = "guest-timer";
    const STIMER: &str = "mode=stimer count=50 cpus=2";
    const DEADLINE: &str = "mode=lapic-deadline count=50 cpus=2";
    const TICKS: &str = "timers=3 period=100000 ms=300";
    const HPET: &str = "mix=all hops=500 cpus=2";
    const END: &str = "guest-end";
    let machines: &[(&str, &str, &[&str], i32)] = &[
        (TIMER, DEADLINE, &["--hv-tsc-page", "--pin", &own], 0),
        (TIMER, STIMER, &["--hv-stimer", "--pin", &second, "--housekeeping", &own], 0),
        (TIMER, STIMER, &["--hv-stimer", "--rt-prio", "1"], 0),
        (TIMER, STIMER, &["--hv-stimer", "--hk-poll", "100"], 0),
        (TIMER, STIMER, &["--hv-stimer", "--stats", &stats, "--boot-timer", "-vvv"], 0),
        (TIMER, DEADLINE, &["--hv-ref-counter", "--lapic-timer", "offload", "--pin", &own], 0),
        (TIMER, STIMER, &["--hv-stimer", "--lapic-timer", "offload", "--hpet", "page"], 0),
        (TIMER, DEADLINE, &["--hv-stimer", "--lapic-timer", "offload", "--hpet", "off"], 0),
        ("guest-hpet-ticks", TICKS, &["--hpet", "page", "--hpet-page-period", "1000"], 0),
        ("guest-hpet-ticks", TICKS, &["--hpet", "exit", "--hpet-timers", "32"], 0),
        ("guest-order", HPET, &["--hpet", "page", "--hv-tsc-page", "--rt-prio", "1"], 0),
        ("guest-clock-cost", "reads=20 batches=10", &["--hv-tsc-page", "--hv-impl", "auto"], 0),
        ("guest-flood", "count=3000", &["--hv-stimer", "--serial", "none", "-vvv"], 0),
        (END, "how=power-off talk=5000", &["--serial", &log, "--mlock"], 0),
        (END, "how=power-off talk=5000", &["--serial", "pty", "--prefault"], 0),
        (END, "how=reset", &["--control", &control, "--clock-discipline", "off"], 32),
        (END, "how=triple-fault", &["--serial", "none", "--prefault", "--mlock"], 33),
        (END, "how=panic", &["--debug-exit"], 34),
        // Long enough for the discipline to look at the clock twice.
        (END, "how=halt cpus=2", &["--hv-stimer", "--hpet", "page", "--timeout", "4.5"], 36),
        (END, "how=spin cpus=2", &["--lapic-timer", "offload", "--timeout", "0.5"], 36),
        (END, "how=emulation-failure", &["--hv-stimer", "-v"], 37),
        (END, "how=reboot", &["--stats", "/dev/null", "--memory", "5G"], 40),
    ];
    for (name, words, arguments, code) in machines {
        let mut command = vmm();
        command.arg("--kernel").arg(guest(name)).args(["--cmdline", words, "--cpus", "2"]);
        let outcome = run(command.args(*arguments), Duration::from_secs(60));
        assert_eq!(outcome.status, *code, "{name} {words} {arguments:?}: {outcome:?}");
    }
    // Huge pages where the host has some.
    let mut command = vmm();
    command.arg("--kernel").arg(guest(END)).args(["--memory", "32M", "--hugepages"]);
    let outcome = run(&mut command, Duration::from_secs(60));
    let missing = outcome.status == 35 && outcome.stderr.contains("nr_hugepages");
    assert!(outcome.status == 0 || missing, "{outcome:?}");
    println!("{} kinds of machines", machines.len() + 1);
}

/// A machine with every kind of thread, at rest until somebody acts on it.
fn resting() -> Command {
    let mut command = vmm();
    command.arg("--kernel").arg(guest("guest-end")).args(["--cmdline", "how=halt cpus=2"]);
    command.args(["--cpus", "2", "--hv-stimer", "--hpet", "page", "--lapic-timer", "offload"]);
    command
}

#[test]
fn a_person_may_do_all_there_is_within_the_lists() {
    if !kvm_or_skip("a_person_may_do_all_there_is_within_the_lists") {
        return;
    }
    let limit = Duration::from_secs(30);
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("control");
    let acts = ["status", "pause", "stats", "resume", "republish", "slew 40", "nmi 1"];

    let mut command = resting();
    command.stdin(Stdio::null()).stdout(Stdio::null());
    let child = command.arg("--control").arg(&path).spawn();
    let mut child = child.expect("the binary starts");
    // More than may connect at a time, and one that leaves amid a line.
    let crowd: Vec<_> = (0..10).map(|_| control::Client::connect(&path)).collect();
    drop(crowd);
    let half = std::os::unix::net::UnixStream::connect(&path).expect("a socket");
    (&half).write_all(b"{\"comm").expect("a socket");
    drop(half);
    let mut client = control::Client::connect(&path);
    for act in acts {
        let (word, value) = act.split_once(' ').unwrap_or((act, ""));
        match word {
            "slew" => client.ask_with(word, &format!(",\"ppb\":{value}")),
            "nmi" => client.ask_with(word, &format!(",\"cpu\":{value}")),
            _ => client.ask(word),
        }
        .unwrap_or_else(|| panic!("over after {act}"));
    }
    for number in [libc::SIGTSTP, libc::SIGCONT, libc::SIGWINCH, libc::SIGSTOP, libc::SIGCONT] {
        // SAFETY: a signal to our own child.
        assert_eq!(unsafe { libc::kill(child.id() as i32, number) }, 0);
    }
    assert!(client.ask("status").is_some());
    assert!(client.ask("quit").is_some());
    assert_eq!(wait(&mut child, limit), Some(0));

    let pty = pty::Pty::new();
    let mut child = pty.spawn(&mut resting());
    pty.expect(0, "\"halt\"}");
    pty.type_in(b"\x01h\x01a\x01c");
    let mut at = pty.expect(0, "(vmm) ");
    for act in acts {
        pty.type_in(act.as_bytes());
        pty.type_in(b"\r");
        at = pty.expect(at, "(vmm) ");
    }
    // SAFETY: a signal to our own child.
    assert_eq!(unsafe { libc::kill(child.id() as i32, libc::SIGTSTP) }, 0);
    let mut status = 0;
    // SAFETY: waits for our own child to stop.
    unsafe { libc::waitpid(child.id() as i32, &raw mut status, libc::WUNTRACED) };
    assert!(libc::WIFSTOPPED(status), "{status:#x}: {}", pty.text());
    // SAFETY: a signal to our own child.
    assert_eq!(unsafe { libc::kill(child.id() as i32, libc::SIGCONT) }, 0);
    while !pty.is_raw() {
        std::thread::yield_now();
    }
    pty.type_in(b"\x01x");
    assert_eq!(wait(&mut child, limit), Some(0), "{}", pty.text());
}
