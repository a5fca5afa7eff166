//! The terminal: raw while the guest owns it, and as it was after every way out.

mod common;
#[path = "common/pty.rs"]
mod pty;

use common::{guest, kvm_or_skip, vmm, wait};
use pty::Pty;
use std::process::{Child, Command};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(20);
const PANICS: &str = "VMM_TERMINAL_TEST_PANICS";

fn machine(guest_name: &str, cmdline: &str) -> Command {
    let mut command = vmm();
    command.arg("--kernel").arg(guest(guest_name)).args(["--memory", "32M", "--cmdline", cmdline]);
    command
}

fn signal(child: &Child, number: i32) {
    // SAFETY: our own child, not yet waited for.
    assert_eq!(unsafe { libc::kill(child.id() as i32, number) }, 0);
}

/// Runs a guest on a terminal, checks that it is raw, ends it, and checks the code
/// and that the terminal is as before.
fn given_back(name: &str, code: i32, end: impl FnOnce(&Pty, &Child)) {
    let pty = Pty::new();
    let before = pty.modes();
    let mut child = pty.spawn(&mut machine("guest-echo", "count=1"));
    pty.expect(0, "ready");
    assert!(pty.is_raw(), "{name}");
    end(&pty, &child);
    assert_eq!(wait(&mut child, LIMIT), Some(code), "{name}: {}", pty.text());
    assert_eq!(pty.modes(), before, "{name}");
}

#[test]
fn the_terminal_is_given_back_on_every_way_out() {
    if !kvm_or_skip("the_terminal_is_given_back_on_every_way_out") {
        return;
    }
    given_back("the guest ends", 0, |pty, _| pty.type_in(b"z"));
    given_back("Ctrl-A x", 0, |pty, _| pty.type_in(b"\x01x"));
    for number in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT] {
        given_back("a signal", 128 + number, |_, child| signal(child, number));
    }
    for number in [libc::SIGSEGV, libc::SIGBUS, libc::SIGABRT, libc::SIGSYS] {
        given_back("a fault of ours", 38, |_, child| signal(child, number));
    }
}

/// The panicking half: does nothing unless the test below runs it.
#[test]
fn panicking_half() {
    if std::env::var_os(PANICS).is_none() {
        return;
    }
    vmm::crash::prepare();
    let _taken = vmm::terminal::Taken::now();
    println!("taken");
    let mut byte = [0];
    let _ = std::io::Read::read(&mut std::io::stdin(), &mut byte);
    let _ = std::thread::spawn(|| panic!("on purpose")).join();
}

/// What the binary does at a panic, in a process that has one: nothing from outside
/// makes the binary panic.
#[test]
fn a_panic_of_any_thread_gives_the_terminal_back() {
    let pty = Pty::new();
    let before = pty.modes();
    let myself = std::env::current_exe().expect("path of the test");
    let mut command = Command::new(myself);
    command.args(["--exact", "panicking_half", "--nocapture"]).env(PANICS, "1");
    let mut child = pty.spawn(&mut command);
    let taken = pty.expect(0, "taken");
    assert!(pty.is_raw());
    pty.type_in(b"x");
    pty.expect(taken, "on purpose");
    assert_eq!(wait(&mut child, LIMIT), Some(38), "{}", pty.text());
    assert_eq!(pty.modes(), before);
}

#[test]
fn what_never_starts_never_touches_the_terminal() {
    let directory = tempfile::tempdir().expect("a directory");
    let text = directory.path().join("text");
    std::fs::write(&text, [b'x'; 10_000]).expect("a file");
    let cut = directory.path().join("cut");
    let whole = std::fs::read(guest("guest-end")).expect("a guest");
    std::fs::write(&cut, &whole[..whole.len() / 8]).expect("a file");
    for kernel in ["/no/such/kernel".as_ref(), text.as_path(), cut.as_path()] {
        let pty = Pty::new();
        let before = pty.modes();
        let mut child = pty.spawn(vmm().arg("--kernel").arg(kernel));
        let code = wait(&mut child, LIMIT);
        assert_eq!(code, Some(35), "{}: {}", kernel.display(), pty.text());
        assert_eq!(pty.modes(), before);
    }
}

/// Every step of the start that needs a descriptor fails in turn, those too that come
/// after the terminal was taken.
#[test]
fn a_start_that_fails_anywhere_gives_the_terminal_back() {
    if !kvm_or_skip("a_start_that_fails_anywhere_gives_the_terminal_back") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let control = directory.path().join("control");
    let mut refused = 0;
    for descriptors in 4.. {
        let pty = Pty::new();
        let before = pty.modes();
        let limited = machine("guest-end", "how=power-off");
        let mut command = Command::new("prlimit");
        command.arg(format!("--nofile={descriptors}")).arg(limited.get_program());
        command.args(limited.get_args()).args(["--timeout", "60", "--hv-stimer"]);
        let mut child = pty.spawn(command.arg("--control").arg(&control));
        let code = wait(&mut child, LIMIT);
        assert_eq!(pty.modes(), before, "with {descriptors} descriptors");
        match code {
            Some(0) => break,
            Some(35) => {
                pty.expect(0, "\r\n");
                let said = pty.text();
                assert!(said.starts_with("vmm: "), "{descriptors}: {said}");
                assert_eq!(said.lines().count(), 1, "{descriptors}: {said}");
            }
            // The loader of shared libraries needs one too.
            Some(127) => continue,
            _ => panic!("{descriptors} descriptors: {code:?}: {}", pty.text()),
        }
        refused += 1;
    }
    println!("{refused} limits on descriptors refused in one line each");
    assert!(refused > 10, "{refused}");
}

#[test]
fn ctrl_c_and_ctrl_a_a_reach_the_guest() {
    if !kvm_or_skip("ctrl_c_and_ctrl_a_a_reach_the_guest") {
        return;
    }
    let pty = Pty::new();
    let mut child = pty.spawn(&mut machine("guest-echo", "count=6"));
    pty.expect(0, "ready");
    // ^C ^Z ^\ ^D, Ctrl-A a, and a carriage return.
    pty.type_in(b"\x03\x1a\x1c\x04\x01a\r");
    pty.expect(0, "\"first\":[3,26,28,4,1,13]");
    assert_eq!(wait(&mut child, LIMIT), Some(0));
}

#[test]
fn the_escape_key_works_in_front_of_a_guest_that_reads_nothing() {
    if !kvm_or_skip("the_escape_key_works_in_front_of_a_guest_that_reads_nothing") {
        return;
    }
    let pty = Pty::new();
    let mut child = pty.spawn(&mut machine("guest-end", "how=halt"));
    pty.expect(0, "halt");
    pty.type_in(&[b'.'; 1000]);
    let help = pty.text().len();
    pty.type_in(b"\x01h");
    pty.expect(help, "Ctrl-A x");
    pty.type_in(b"\x01x");
    assert_eq!(wait(&mut child, LIMIT), Some(0), "{}", pty.text());
}

#[test]
fn the_monitor_tells_and_acts() {
    if !kvm_or_skip("the_monitor_tells_and_acts") {
        return;
    }
    let pty = Pty::new();
    let mut child = pty.spawn(&mut machine("guest-echo", "count=2"));
    pty.expect(0, "ready");
    pty.type_in(b"\x01c");
    let mut at = pty.expect(0, "(vmm) ");
    for (command, reply) in [
        ("status", "running"),
        ("stats", "port_read"),
        ("pause", "paused"),
        ("status", "paused"),
        ("resume", "running"),
        ("xyz\x7f\x7f\x7fhelp", "nmi"),
        ("nonsense", "nonsense"),
    ] {
        pty.type_in(command.as_bytes());
        pty.type_in(b"\r");
        at = pty.expect(at, "\r\n");
        pty.expect(at, reply);
        at = pty.expect(at, "(vmm) ");
    }
    // Nothing of that was the guest's; what follows is.
    pty.type_in(b"\x01cok");
    pty.expect(at, "\"first\":[111,107]");
    assert_eq!(wait(&mut child, LIMIT), Some(0), "{}", pty.text());
}

#[test]
fn a_job_in_the_background_leaves_the_terminal_alone() {
    if !kvm_or_skip("a_job_in_the_background_leaves_the_terminal_alone") {
        return;
    }
    // A shell with job control starts it in the background and tells its number; TOSTOP
    // would stop any that touches the modes, and a read any that listens.
    let pty = Pty::new();
    let command = machine("guest-end", "how=halt");
    let words: Vec<String> = std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|word| format!("'{}'", word.to_string_lossy()))
        .collect();
    let script = format!(
        "set -m; {} & echo started; read line; jobs; kill %1; wait %1; echo code $?; exec sleep 0",
        words.join(" ")
    );
    let mut shell = pty.spawn(Command::new("bash").args(["-c", &script]));
    let before = pty.modes();
    pty.expect(0, "\"how\":\"halt\"");
    assert_eq!(pty.modes(), before);
    pty.type_in(b"for the shell\n");
    pty.expect(0, "Running");
    pty.expect(0, "code 143");
    assert_eq!(pty.modes(), before);
    assert_eq!(wait(&mut shell, LIMIT), Some(0));
}

#[test]
fn bursts_of_harmless_signals_neither_kill_nor_speak() {
    if !kvm_or_skip("bursts_of_harmless_signals_neither_kill_nor_speak") {
        return;
    }
    let pty = Pty::new();
    let mut child = pty.spawn(&mut machine("guest-echo", "count=1"));
    let ready = pty.expect(0, "ready");
    for _ in 0..200 {
        for number in [libc::SIGWINCH, libc::SIGSTOP, libc::SIGCONT, libc::SIGURG, libc::SIGCHLD] {
            signal(&child, number);
        }
    }
    pty.type_in(b"z");
    pty.expect(ready, "\"first\":[122]");
    assert_eq!(wait(&mut child, LIMIT), Some(0));
    assert!(!pty.text().contains("vmm:"), "{}", pty.text());
}

#[test]
fn continued_it_is_raw_again() {
    if !kvm_or_skip("continued_it_is_raw_again") {
        return;
    }
    let pty = Pty::new();
    let before = pty.modes();
    let mut child = pty.spawn(&mut machine("guest-echo", "count=1"));
    pty.expect(0, "ready");
    signal(&child, libc::SIGTSTP);
    let mut status = 0;
    // SAFETY: waits for our own child to stop.
    unsafe { libc::waitpid(child.id() as i32, &raw mut status, libc::WUNTRACED) };
    assert!(libc::WIFSTOPPED(status));
    assert_eq!(pty.modes(), before, "given back while stopped");
    signal(&child, libc::SIGCONT);
    // Only a raw terminal lets a Ctrl-D through to the guest.
    while !pty.is_raw() {
        std::thread::yield_now();
    }
    pty.type_in(b"\x04");
    pty.expect(0, "\"first\":[4]");
    assert_eq!(wait(&mut child, LIMIT), Some(0));
    assert_eq!(pty.modes(), before);
}
