//! Guest memory of every size and backing.

mod common;

use common::{guest, kvm_or_skip, results, run, tail, vmm};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// What the memory map leaves out: from the EBDA to 1 MiB.
const NOT_RAM: u64 = 0x10_0000 - 0x9_fc00;
const INITRD: u64 = 30 * MIB;

fn machine(memory: u64) -> Command {
    let mut command = vmm();
    command.arg("--kernel").arg(guest("guest-memory"));
    command.args(["--memory", &format!("{}K", memory >> 10)]);
    command
}

fn initrd(directory: &Path) -> std::path::PathBuf {
    let path = directory.join("initrd");
    let bytes: Vec<u8> = (0..INITRD).map(|i| (i.wrapping_mul(0x9e37_79b9) >> 24) as u8).collect();
    std::fs::write(&path, bytes).expect("a temporary file");
    path
}

fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[test]
fn sizes_around_the_hole_are_all_there() {
    if !kvm_or_skip("sizes_around_the_hole_are_all_there") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let initrd = initrd(directory.path());
    let hash = fnv1a(&std::fs::read(&initrd).expect("the file"));
    for mib in [256, 2048, 3072, 3330, 4096, 5120] {
        for size in [mib - 1, mib, mib + 1].map(|mib| mib * MIB) {
            let outcome = run(machine(size).arg("--initrd").arg(&initrd), LIMIT);
            assert_eq!(outcome.status, 0, "{size}: {}{}", outcome.stderr, tail(&outcome.stdout));
            let found = results(&outcome.stdout);
            let found = found.last().unwrap_or_else(|| panic!("{}", tail(&outcome.stdout)));
            assert_eq!(found["ram"], size - NOT_RAM, "{size}: {found}");
            assert_eq!(found["low_end"], size.min(3 << 30), "{size}: {found}");
            assert_eq!(found["last_page_kept"], true, "{size}: {found}");
            assert_eq!(found["initrd_bytes"], INITRD, "{size}: {found}");
            assert_eq!(found["initrd_fnv1a"], hash, "{size}: {found}");
        }
    }
}

fn locked_kib(process: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("VmLck:"));
    line.and_then(|l| l.trim().strip_suffix(" kB")?.trim().parse().ok()).unwrap_or(0)
}

#[test]
fn prefaulted_and_locked_memory_is_there_before_the_guest() {
    use std::io::{BufRead, BufReader};
    use std::process::Stdio;
    if !kvm_or_skip("prefaulted_and_locked_memory_is_there_before_the_guest") {
        return;
    }
    for (flag, locked) in [("--prefault", false), ("--mlock", true)] {
        let mut command = vmm();
        command.arg("--kernel").arg(guest("guest-end")).args(["--cmdline", "how=halt", flag]);
        command.args(["--memory", "64M"]).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("the binary starts");
        let mut line = String::new();
        let stdout = child.stdout.take().expect("piped");
        BufReader::new(stdout).read_line(&mut line).expect("a line");
        let id = child.id().to_string();
        let resident = std::fs::read_to_string(format!("/proc/{id}/statm")).expect("a process");
        let pages = resident.split(' ').nth(1).and_then(|n| n.parse().ok()).unwrap_or(0_u64);
        let kib = locked_kib(&id);
        let _ = child.kill();
        let _ = child.wait();
        assert!(line.contains("@result"), "{flag}: {line}");
        assert!(pages * 4096 >= 64 * MIB, "{flag}: {pages} pages");
        assert_eq!(kib >= 64 << 10, locked, "{flag}: {kib} KiB");
    }
}

/// Number of free huge pages of this size; `None` where the host knows no such size.
fn free_huge_pages(size: u64) -> Option<u64> {
    let path = format!("/sys/kernel/mm/hugepages/hugepages-{}kB/free_hugepages", size >> 10);
    std::fs::read_to_string(path).ok().and_then(|n| n.trim().parse().ok())
}

/// One line, the documented code, before the guest.
fn refused(command: &mut Command, names: &str) {
    let outcome = run(command, LIMIT);
    assert_eq!(outcome.status, 35, "{outcome:?}");
    assert_eq!(outcome.stderr.lines().count(), 1, "{outcome:?}");
    assert!(outcome.stderr.contains(names), "{names}: {outcome:?}");
    assert_eq!(outcome.stdout, "", "{outcome:?}");
}

#[test]
fn huge_pages_are_used_or_missed_in_one_line() {
    if !kvm_or_skip("huge_pages_are_used_or_missed_in_one_line") {
        return;
    }
    for (flag, size, name) in [("--hugepages=2M", 2 * MIB, "2M"), ("--hugepages=1G", GIB, "1G")] {
        // Always more than there are.
        let free = free_huge_pages(size);
        let missed = if free.is_some() { "nr_hugepages" } else { "no huge pages of that size" };
        refused(machine((free.unwrap_or(0) + 16) * size).arg(flag), missed);
        refused(machine(257 * MIB).arg(flag), name);

        let memory = size.max(32 * MIB);
        if free < Some(memory / size) {
            println!("SKIPPED the half with huge pages of {name}: {free:?} are free");
            continue;
        }
        let outcome = run(machine(memory).arg(flag), LIMIT);
        assert_eq!(outcome.status, 0, "{outcome:?}");
        assert_eq!(results(&outcome.stdout)[0]["ram"], memory - NOT_RAM);
        println!("{name}: {memory} bytes of guest memory are on huge pages");
    }
}

/// A host whose processor or kernel knows no such pages: its sysfs does not list them.
#[test]
fn a_host_without_huge_pages_of_that_size_says_so() {
    // SAFETY: geteuid has no precondition.
    if unsafe { libc::geteuid() } != 0 {
        println!("SKIPPED a_host_without_huge_pages_of_that_size_says_so: it takes root");
        return;
    }
    if !kvm_or_skip("a_host_without_huge_pages_of_that_size_says_so") {
        return;
    }
    let script = "mount -t tmpfs none /sys/kernel/mm/hugepages && exec \"$0\" \"$@\"";
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", script, env!("CARGO_BIN_EXE_vmm"), "--kernel"]);
    // More than any host has.
    command.arg(guest("guest-memory")).args(["--memory", "4096G", "--hugepages=1G"]);
    refused(&mut command, "no huge pages of that size");
}

#[test]
fn a_limit_on_locked_memory_is_one_line() {
    if !kvm_or_skip("a_limit_on_locked_memory_is_one_line") {
        return;
    }
    // Root may lock what it likes, unless it gives that privilege up.
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set", "-ipc_lock", "prlimit", "--memlock=1048576:1048576"]);
    command.arg(env!("CARGO_BIN_EXE_vmm")).arg("--kernel").arg(guest("guest-memory"));
    refused(command.args(["--memory", "64M", "--mlock"]), "ulimit -l");
}
