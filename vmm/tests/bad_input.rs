//! Whatever a user gets wrong is one line that names it, exit code 35, at once.

#![allow(clippy::unwrap_used)] // a failed unwrap is a failed test

mod common;

use common::{run, vmm};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// A wrong argument must be told within this time, on a machine with nothing else
/// to do; the test allows for a busy one.
const AT_ONCE: Duration = Duration::from_millis(200);
const BUSY_FACTOR: u32 = 10;

fn refused(command: &mut Command, names: &str) {
    let outcome = run(command, Duration::from_secs(20));
    let shown = format!("{command:?}: {outcome:?}");
    assert_eq!(outcome.status, 35, "{shown}");
    assert_eq!(outcome.stderr.lines().count(), 1, "{shown}");
    assert!(outcome.stderr.starts_with("vmm: ") && outcome.stderr.contains(names), "{shown}");
    assert!(!outcome.stderr.contains("panicked"), "{shown}");
    assert_eq!(outcome.stdout, "", "{shown}");
    assert!(outcome.elapsed < AT_ONCE * BUSY_FACTOR, "{shown}");
}

/// Writes a file and returns its path as text.
fn file(directory: &Path, name: &str, bytes: &[u8]) -> String {
    let path = directory.join(name);
    std::fs::write(&path, bytes).expect("a temporary file");
    path.display().to_string()
}

/// The start of an x86 bzImage whose header promises `syssize` × 16 bytes.
fn bzimage(syssize: u32, init_size: u32) -> Vec<u8> {
    let mut image = vec![0u8; 5 * 512 + syssize as usize * 16];
    image[0x1f1] = 4;
    image[0x1f4..0x1f8].copy_from_slice(&syssize.to_le_bytes());
    image[0x202..0x206].copy_from_slice(b"HdrS");
    image[0x206..0x208].copy_from_slice(&0x020f_u16.to_le_bytes());
    image[0x211] = 1;
    image[0x214..0x218].copy_from_slice(&0x10_0000_u32.to_le_bytes());
    image[0x22c..0x230].copy_from_slice(&0x7fff_ffff_u32.to_le_bytes());
    image[0x230..0x234].copy_from_slice(&0x20_0000_u32.to_le_bytes());
    image[0x234] = 1;
    image[0x236] = 1;
    image[0x238..0x23c].copy_from_slice(&255_u32.to_le_bytes());
    image[0x258..0x260].copy_from_slice(&0x100_0000_u64.to_le_bytes());
    image[0x260..0x264].copy_from_slice(&init_size.to_le_bytes());
    image
}

#[test]
fn wrong_arguments() {
    for (arguments, names) in [
        (&[][..], "--kernel"),
        (&["--kernel"], "--kernel"),
        (&["-k", "/dev/null", "--cpus", "0"], "--cpus"),
        (&["-k", "/dev/null", "--cpus", "many"], "--cpus"),
        (&["-k", "/dev/null", "--cpus", "-1"], "--cpus"),
        (&["-k", "/dev/null", "--memory", "lots"], "--memory"),
        (&["-k", "/dev/null", "--memory", "99999999999999G"], "--memory"),
        (&["-k", "/dev/null", "--timeout", "0"], "--timeout"),
        (&["-k", "/dev/null", "--hv-impl", "magic"], "--hv-impl"),
        (&["--no-such-flag"], "--no-such-flag"),
    ] {
        refused(vmm().args(arguments), names);
    }
}

#[test]
fn wrong_machines() {
    if !common::kvm_or_skip("wrong_machines") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let kernel = file(directory.path(), "kernel", &bzimage(1000, 1 << 20));
    for (arguments, names) in [
        (&["--cpus", "100000"][..], "--cpus"),
        (&["--memory", "0"], "--memory"),
        (&["--memory", "1M"], "--memory"),
        (&["--memory", "4095K"], "--memory"),
        (&["--memory", "16000000G"], "--memory"),
        (&["--cmdline", &"x".repeat(256)], "--cmdline"),
        (&["--initrd", "/no/such/initrd"], "/no/such/initrd"),
        (&["--initrd", "/dev/null"], "/dev/null"),
        (&["--initrd", "/"], "--initrd"),
    ] {
        refused(vmm().args(["--boot", "setup", "--kernel", &kernel]).args(arguments), names);
    }
    let large = directory.path().join("large");
    std::fs::File::create(&large).unwrap().set_len(1 << 30).unwrap();
    refused(vmm().args(["--boot", "setup", "--kernel", &kernel, "--initrd"]).arg(&large), "large");
}

/// What is to be written is found not to be writable before the guest runs.
#[test]
fn wrong_places_for_what_we_write() {
    if !common::kvm_or_skip("wrong_places_for_what_we_write") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let there = directory.path().display().to_string();
    let precious = file(directory.path(), "precious", b"precious");
    let nowhere = format!("{there}/no/file");
    let long = format!("{there}/{}", "x".repeat(120));
    let _listener = std::os::unix::net::UnixListener::bind(format!("{there}/busy")).unwrap();
    let busy = format!("{there}/busy");
    for (flag, prefix, path, names) in [
        ("--stats", "", &nowhere, "No such file"),
        ("--stats", "", &there, "directory"),
        ("--stats", "", &"/dev/full".into(), "No space"),
        ("--stats", "", &"/proc/version".into(), "Input/output"),
        ("--control", "", &nowhere, "No such file"),
        ("--control", "", &there, "no socket"),
        ("--control", "", &precious, "no socket"),
        ("--control", "", &busy, "another machine"),
        ("--control", "", &"/proc/control".into(), "No such file"),
        ("--control", "", &long, "shorter"),
        ("--serial", "file=", &nowhere, "No such file"),
        ("--serial", "file=", &there, "directory"),
        ("--serial", "file=", &"/dev/full".into(), "No space"),
        ("--serial", "file=", &"/proc/version".into(), "Input/output"),
    ] {
        let value = format!("{prefix}{path}");
        let mut command = vmm();
        command.arg("--kernel").arg(common::guest("guest-end")).args([flag, &value]);
        refused(&mut command, &format!("{flag} {value}: "));
        let said = run(&mut command, Duration::from_secs(20)).stderr;
        assert!(said.contains(names), "{names}: {said}");
    }
    assert_eq!(std::fs::read(precious).unwrap(), b"precious");
}

/// A disk may still fill up meanwhile; then the line tells how the guest ended.
#[test]
fn a_disk_that_fills_up_during_the_run() {
    if !common::kvm_or_skip("a_disk_that_fills_up_during_the_run") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let stats = directory.path().join("stats");
    let mut command = Command::new("prlimit");
    command.args(["--fsize=16", env!("CARGO_BIN_EXE_vmm"), "--kernel"]);
    command.arg(common::guest("guest-end")).args(["--cmdline", "how=panic", "--stats"]);
    let outcome = run(command.arg(&stats), Duration::from_secs(20));
    assert_eq!(outcome.status, 35, "{outcome:?}");
    assert_eq!(outcome.stderr.lines().count(), 1, "{outcome:?}");
    assert!(outcome.stderr.contains("--stats "), "{outcome:?}");
    assert!(outcome.stderr.contains("the guest's kernel panicked"), "{outcome:?}");
}

#[test]
fn wrong_kernels() {
    if !common::kvm_or_skip("wrong_kernels") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let d = directory.path();
    let good = bzimage(1000, 1 << 20);
    let mut arm = vec![0u8; 4096];
    arm[56..60].copy_from_slice(b"ARM\x64");
    let mut elf32 = b"\x7fELF\x01\x01\x01".to_vec();
    elf32.resize(4096, 0);
    elf32[18] = 3;
    let mut elf64 = b"\x7fELF\x02\x01\x01".to_vec();
    elf64.resize(4096, 0);
    elf64[18] = 62;
    let files = [
        (file(d, "empty", b""), "empty"),
        (file(d, "short", &[0; 600]), "too short"),
        (file(d, "text", &[b'x'; 10_000]), "not a kernel"),
        (file(d, "truncated", &good[..good.len() / 2]), "cut short"),
        (file(d, "headless", &good[..0x240]), "cut short"),
        (file(d, "greedy", &bzimage(1000, u32::MAX)), "--memory"),
        (file(d, "Image", &arm), "arm64"),
        (file(d, "elf32", &elf32), "ELF file without a segment"),
        (file(d, "elf64", &elf64), "elf64"),
        (d.display().to_string(), "directory"),
        ("/no/such/kernel".into(), "/no/such/kernel"),
        ("/dev/null".into(), "regular file"),
    ];
    for (kernel, names) in files {
        refused(vmm().args(["--boot", "setup", "--kernel", &kernel]), names);
    }
}

/// Runs the binary where /dev/kvm is hidden or not ours; that takes root.
fn without_kvm(set_up: &str, names: &str) {
    let script = format!("{set_up} exec \"$0\" --kernel /bin/true");
    let script = script.replace("exec \"$0\"", "exec $PREFIX \"$0\"");
    refused(
        Command::new("unshare").args(["--mount", "sh", "-c", &script, env!("CARGO_BIN_EXE_vmm")]),
        names,
    );
}

#[test]
fn no_kvm_and_no_permission() {
    // SAFETY: geteuid has no precondition.
    if unsafe { libc::geteuid() } != 0 {
        println!("SKIPPED no_kvm_and_no_permission: hiding /dev/kvm takes root");
        return;
    }
    if !common::kvm_or_skip("no_kvm_and_no_permission") {
        return;
    }
    without_kvm("mkdir -p /tmp && mount -t tmpfs none /dev && exec 2>&2;", "/dev/kvm");
    without_kvm("PREFIX='setpriv --reuid 65534 --clear-groups'; chmod 0600 /dev/kvm;", "group kvm");
}
