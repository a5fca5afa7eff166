//! Every thread is confined while the guest runs, and a call that is not on its
//! list ends the process with a line.

mod common;

use common::{guest, kvm_or_skip, run, vmm};
use std::io::{BufRead, BufReader};
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
