//! Standard input and output of every kind. `BLOCKED_SECONDS=30` is the full length of
//! a blocked standard output.

mod common;
#[path = "common/control.rs"]
mod control;
#[path = "common/pty.rs"]
mod pty;

use common::{Outcome, guest, kvm_or_skip, results, run, tail, vmm, wait};
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(60);
const PASTE: usize = 64 << 10;

fn machine(name: &str, cmdline: &str) -> Command {
    let mut command = vmm();
    command.arg("--kernel").arg(guest(name)).args(["--memory", "32M", "--cmdline", cmdline]);
    command
}

/// Every byte value, in an order without a short period.
fn paste() -> Vec<u8> {
    (0..PASTE as u64).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

fn assert_echoed(console: &str, bytes: &[u8]) {
    let results = results(console);
    let echoed = results.last().unwrap_or_else(|| panic!("{}", tail(console)));
    assert_eq!(echoed["bytes"], bytes.len(), "{echoed}");
    assert_eq!(echoed["fnv1a"], fnv1a(bytes), "{echoed}");
}

/// Runs to the end with this as standard input.
fn run_with(input: Stdio, command: &mut Command) -> Outcome {
    let child = command.stdin(input).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    finish(child.expect("the binary starts"))
}

fn finish(mut child: Child) -> Outcome {
    let started = Instant::now();
    let (mut stdout, mut stderr) = (String::new(), String::new());
    let mut out = child.stdout.take().expect("piped");
    let reader = std::thread::spawn(move || {
        let _ = out.read_to_string(&mut stdout);
        stdout
    });
    let status = wait(&mut child, LIMIT).expect("an end");
    let _ = child.stderr.take().expect("piped").read_to_string(&mut stderr);
    let stdout = reader.join().expect("the console");
    Outcome { status, stdout, stderr, elapsed: started.elapsed() }
}

#[test]
fn sixty_four_kib_arrive_intact_from_a_pipe_and_from_a_file() {
    if !kvm_or_skip("sixty_four_kib_arrive_intact_from_a_pipe_and_from_a_file") {
        return;
    }
    let bytes = paste();
    let cmdline = format!("count={PASTE}");
    let mut command = machine("guest-echo", &cmdline);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    let (mut pipe, all) = (child.stdin.take().expect("piped"), bytes.clone());
    let writer = std::thread::spawn(move || pipe.write_all(&all));
    assert_echoed(&finish(child).stdout, &bytes);
    writer.join().expect("the writer").expect("the pipe took all");

    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("input");
    std::fs::write(&path, &bytes).expect("a file");
    let file = File::open(&path).expect("a file");
    assert_echoed(&run_with(file.into(), &mut machine("guest-echo", &cmdline)).stdout, &bytes);
}

#[test]
fn sixty_four_kib_pasted_on_a_terminal_arrive_intact() {
    if !kvm_or_skip("sixty_four_kib_pasted_on_a_terminal_arrive_intact") {
        return;
    }
    let pty = pty::Pty::new();
    // Ctrl-A is the one byte with a meaning of its own.
    let bytes: Vec<u8> = paste().into_iter().map(|b| if b == 1 { 2 } else { b }).collect();
    let mut child = pty.spawn(&mut machine("guest-echo", &format!("count={PASTE}")));
    pty.expect(0, "ready");
    pty.type_in(&bytes);
    assert_eq!(wait(&mut child, LIMIT), Some(0), "{}", pty.text());
    assert_echoed(&pty.text(), &bytes);
}

#[test]
fn the_end_of_input_ends_nothing_and_costs_nothing() {
    if !kvm_or_skip("the_end_of_input_ends_nothing_and_costs_nothing") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("input");
    std::fs::write(&path, "three\n").expect("a file");
    let closed_pipe = || {
        let mut ends = [-1; 2];
        // SAFETY: pipe fills both descriptors; the writing end is closed here and
        // the reading end is owned by the Stdio.
        unsafe {
            use std::os::fd::FromRawFd;
            assert_eq!(libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC), 0);
            libc::close(ends[1]);
            Stdio::from(std::os::fd::OwnedFd::from_raw_fd(ends[0]))
        }
    };
    for (what, input) in [
        ("/dev/null", Stdio::null()),
        ("a file", File::open(&path).expect("a file").into()),
        ("a closed pipe", closed_pipe()),
        ("/dev/zero", File::open("/dev/zero").expect("a device").into()),
        ("nothing", Stdio::null()),
    ] {
        let mut command = machine("guest-end", "how=halt");
        command.args(["--timeout", "2"]);
        if what == "nothing" {
            // SAFETY: close is safe between fork and exec.
            unsafe {
                command.pre_exec(|| {
                    libc::close(0);
                    Ok(())
                });
            }
        }
        let child = command.stdin(input).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let (status, used) = status_and_cpu_time(&child.expect("the binary starts"));
        assert_eq!(status, 36, "{what}");
        println!("{what}: {used:?} of CPU time in 2 s, start included");
        // 5 % of two seconds, and what starting costs a debug build.
        assert!(used < Duration::from_millis(100 + 200), "{what}: {used:?}");
    }
}

/// Waits for the end; the exit code, and the CPU time of the whole life.
fn status_and_cpu_time(child: &Child) -> (i32, Duration) {
    let mut status = 0;
    // SAFETY: `rusage` is plain data, filled by wait4 for a child of ours that
    // nobody else waits for.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        let id = child.id() as i32;
        assert_eq!(libc::wait4(id, &raw mut status, 0, &raw mut usage), id);
        usage
    };
    let time = |t: libc::timeval| Duration::new(t.tv_sec as u64, t.tv_usec as u32 * 1000);
    (libc::WEXITSTATUS(status), time(usage.ru_utime) + time(usage.ru_stime))
}

#[test]
fn a_flood_of_input_stays_outside() {
    if !kvm_or_skip("a_flood_of_input_stays_outside") {
        return;
    }
    let mut command = machine("guest-end", "how=halt");
    command.args(["--timeout", "2"]).stdin(Stdio::piped());
    let mut child = command.stdout(Stdio::null()).spawn().expect("the binary starts");
    let mut pipe = child.stdin.take().expect("piped");
    let flood = std::thread::spawn(move || {
        let mut sent = 0_usize;
        while let Ok(n) = pipe.write(&[b'x'; 4096]) {
            sent += n;
        }
        sent
    });
    let id = child.id();
    let mut peak = 0;
    while child.try_wait().expect("our child").is_none() {
        peak = peak.max(anonymous_kib(id).unwrap_or(0));
        std::thread::sleep(Duration::from_millis(20));
    }
    let sent = flood.join().expect("the flood");
    println!("{sent} bytes left the sender; anonymous memory at most {peak} KiB");
    // The pipe's own 64 KiB, one chunk of ours, the guest's FIFO.
    assert!(sent <= (64 << 10) + 4096 + 64, "{sent}");
    assert!(peak < 24 << 10, "{peak} KiB");
}

fn anonymous_kib(process: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    line.trim().strip_suffix(" kB")?.trim().parse().ok()
}

#[test]
fn a_blocked_stdout_does_not_stop_the_guest() {
    if !kvm_or_skip("a_blocked_stdout_does_not_stop_the_guest") {
        return;
    }
    // Three times what the pipe holds, and then power-off: a guest that waited for
    // its console would never get there.
    let mut command = machine("guest-end", "how=power-off talk=200000");
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    let unread = child.stdout.take();
    assert_eq!(wait(&mut child, LIMIT), Some(0));
    let mut said = String::new();
    child.stderr.take().expect("piped").read_to_string(&mut said).expect("text");
    assert!(said.contains("dropped"), "{said}");
    drop(unread);
}

#[test]
fn guest_time_runs_on_while_stdout_is_blocked() {
    if !kvm_or_skip("guest_time_runs_on_while_stdout_is_blocked") {
        return;
    }
    let seconds = std::env::var("BLOCKED_SECONDS").ok().and_then(|s| s.parse().ok()).unwrap_or(5);
    let blocked = Duration::from_secs(seconds);
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("control");
    let mut command = machine("guest-console-flood", "");
    command.arg("--hv-tsc-page").arg("--control").arg(&path);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the binary starts");
    let mut stdout = child.stdout.take().expect("piped");
    // One page: the console thread is blocked at once, and all the time.
    let capacity = {
        use std::os::fd::AsRawFd;
        // SAFETY: no memory is passed; the kernel rounds up to a page.
        unsafe { libc::fcntl(stdout.as_raw_fd(), libc::F_SETPIPE_SZ, 4096) as u64 }
    };
    let mut client = control::Client::connect(&path);
    let written = |client: &mut control::Client| {
        let exits = client.ask("stats").expect("a running machine");
        exits["reasons"]["port_write"]["count"].as_u64().expect("a count")
    };
    while written(&mut client) < 3 * capacity {}
    let (began, reference) = (Instant::now(), client.reference().expect("a running machine"));
    let mut before = written(&mut client);
    for second in 1..=seconds {
        std::thread::sleep(Duration::from_secs(second).saturating_sub(began.elapsed()));
        // The main loop answers, and the guest has written more.
        let after = written(&mut client);
        assert!(after > before, "{after} writes after {second} s, {before} before");
        before = after;
    }
    let passed = client.reference().expect("a running machine") - reference;
    assert!(passed >= blocked.as_nanos() as u64 / 100, "{passed} × 100 ns of reference time");

    // Read from now on; what waited is gone before the guest is told to stop.
    let mut console = vec![0; (capacity + 4096) as usize];
    stdout.read_exact(&mut console).expect("what waited");
    let reader = std::thread::spawn(move || {
        let _ = stdout.read_to_end(&mut console);
        String::from_utf8_lossy(&console).into_owned()
    });
    let waiting = written(&mut client);
    while written(&mut client) < waiting + 20_000 {}
    child.stdin.take().expect("piped").write_all(b"x").expect("a pipe");
    assert_eq!(wait(&mut child, LIMIT), Some(0));
    let mut said = String::new();
    child.stderr.take().expect("piped").read_to_string(&mut said).expect("text");
    let console = reader.join().expect("the console");
    let results = results(&console);
    let told = results.last().unwrap_or_else(|| panic!("{}", tail(&console)));
    println!("blocked for {seconds} s: {told}; {}", said.trim());

    let number = |key: &str| told[key].as_u64().unwrap_or_else(|| panic!("{key}: {told}"));
    let (page, cycles) = (number("elapsed_100ns"), number("elapsed_cycles"));
    assert!(Duration::from_nanos(page * 100) >= blocked, "{told}");
    assert_eq!(number("backward"), 0, "{told}");
    // Between two readings of two clocks may lie whatever the host does to a vCPU.
    let tsc = (u128::from(cycles) * 10_000_000 / u128::from(number("tsc_hz"))) as u64;
    assert!(tsc.abs_diff(page) < 1_000_000, "TSC {tsc}, page {page} × 100 ns: {told}");
    // No write waited for the reader: the host's own business is far below a second.
    assert!(number("longest_100ns") < 10_000_000, "{told}");
    let kept = (console.len() as u64).saturating_sub(200);
    assert!(kept >= number("bytes") || said.contains("dropped"), "{kept}: {told}, {said}");
}

#[test]
fn a_stderr_that_takes_nothing_changes_no_exit_code() {
    let full = || File::options().write(true).open("/dev/full").expect("a device");
    let mut refused = vmm();
    let status = refused.args(["--kernel", "/no/such/kernel"]).stderr(full()).status();
    assert_eq!(status.expect("the binary starts").code(), Some(35));
    if !kvm_or_skip("a_stderr_that_takes_nothing_changes_no_exit_code") {
        return;
    }
    let mut faulting = machine("guest-end", "how=triple-fault");
    faulting.args(["-vvv", "--boot-timer", "--serial", "pty"]).stdin(Stdio::null());
    let status = faulting.stderr(full()).status();
    assert_eq!(status.expect("the binary starts").code(), Some(33));
}

#[test]
fn the_serial_line_leads_where_it_is_told() {
    if !kvm_or_skip("the_serial_line_leads_where_it_is_told") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("log");
    let to_file = format!("file={}", path.display());
    let outcome = run(machine("guest-end", "how=power-off").args(["--serial", &to_file]), LIMIT);
    assert_eq!((outcome.status, outcome.stdout.as_str()), (0, ""), "{}", outcome.stderr);
    assert!(std::fs::read_to_string(&path).expect("a log").contains("power-off"));

    let outcome = run(machine("guest-end", "how=power-off").args(["--serial", "none"]), LIMIT);
    assert_eq!((outcome.status, outcome.stdout.as_str()), (0, ""), "{}", outcome.stderr);

    let nowhere = "file=/no/such/directory/log";
    let outcome = run(machine("guest-end", "how=power-off").args(["--serial", nowhere]), LIMIT);
    assert_eq!(outcome.status, 35, "{}", outcome.stderr);
    assert!(outcome.stderr.contains(nowhere), "{}", outcome.stderr);
}

#[test]
fn a_pseudo_terminal_carries_both_directions() {
    if !kvm_or_skip("a_pseudo_terminal_carries_both_directions") {
        return;
    }
    let mut command = machine("guest-echo", "count=4");
    command.args(["--serial", "pty"]).stdin(Stdio::null()).stdout(Stdio::null());
    let mut child = command.stderr(Stdio::piped()).spawn().expect("the binary starts");
    let mut said = std::io::BufReader::new(child.stderr.take().expect("piped"));
    let mut line = String::new();
    std::io::BufRead::read_line(&mut said, &mut line).expect("a line");
    let name = line.trim().rsplit(' ').next().expect("a name");
    let mut terminal = File::options().read(true).write(true).open(name).expect(&line);
    terminal.write_all(b"\x01\x03\x11\xff").expect("the terminal takes input");
    let mut console = String::new();
    while !console.contains("[1,3,17,255]") {
        let mut chunk = [0; 256];
        let n = terminal.read(&mut chunk).expect("output");
        console.push_str(&String::from_utf8_lossy(&chunk[..n]));
    }
    assert_eq!(wait(&mut child, LIMIT), Some(0), "{console}");
}
