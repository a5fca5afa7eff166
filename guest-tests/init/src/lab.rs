//! The lab's side of `guest_tests::lab`: loads KVM, runs one command, and sends
//! its output, status and files to the host over serial ports of their own.
//!
//! ttyS0 is the kernel's console, ttyS1 the command's standard output, ttyS2 its
//! standard error. ttyS3 carries the protocol, one line each:
//! `step WORDS`, `begin`, `exit STATUS`, `file SIZE NAME` followed by SIZE bytes,
//! and `end`.

use crate::{kvm_probe, run};
use std::ffi::CString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::{Command, Stdio};

/// In the order of their dependencies.
const MODULES: [&str; 3] = ["irqbypass", "kvm", "kvm-amd"];
/// Where the command runs: the host's files are here, and what it writes to
/// `out` goes back.
const WORK: &str = "/work";

/// `lab`: returns when everything has been sent.
///
/// # Errors
/// The first step that fails; the host reads it on the console.
pub fn run() -> Result<(), String> {
    let mut host = port(3)?;
    let mut say = |words: &str| writeln!(host, "{words}").map_err(|e| format!("ttyS3: {e}"));

    say("step loading KVM")?;
    let cmdline = fs::read_to_string("/proc/cmdline").map_err(|e| format!("/proc/cmdline: {e}"))?;
    for module in MODULES {
        load(&format!("/lab/modules/{module}.ko"), &parameters(&cmdline, module))?;
    }
    kvm_probe::run()?;

    let command = fs::read_to_string("/lab/command").map_err(|e| format!("/lab/command: {e}"))?;
    fs::create_dir_all(format!("{WORK}/out")).map_err(|e| format!("{WORK}/out: {e}"))?;
    let (stdout, stderr) = (port(1)?, port(2)?);
    say("begin")?;
    let status = Command::new("/bin/sh")
        .args(["-c", &command])
        .current_dir(WORK)
        .env_clear()
        .env("PATH", "/work:/bin")
        .env("HOME", WORK)
        .stdin(Stdio::null())
        .stdout(stdout.try_clone().map_err(|e| format!("ttyS1: {e}"))?)
        .stderr(stderr.try_clone().map_err(|e| format!("ttyS2: {e}"))?)
        .status()
        .map_err(|e| format!("/bin/sh: {e}"))?;
    drain(&stdout);
    drain(&stderr);
    say(&format!("exit {}", run::exit_code(status)))?;

    send_files(&mut host, Path::new(&format!("{WORK}/out"))).map_err(|e| format!("ttyS3: {e}"))?;
    writeln!(host, "end").map_err(|e| format!("ttyS3: {e}"))?;
    drain(&host);
    Ok(())
}

fn send_files(host: &mut File, directory: &Path) -> io::Result<()> {
    let mut entries: Vec<_> = fs::read_dir(directory)?.collect::<io::Result<_>>()?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries.iter().filter(|entry| entry.path().is_file()) {
        let bytes = fs::read(entry.path())?;
        writeln!(host, "file {} {}", bytes.len(), entry.file_name().to_string_lossy())?;
        host.write_all(&bytes)?;
    }
    Ok(())
}

/// Opens a serial port whose bytes pass unchanged.
fn port(number: u32) -> Result<File, String> {
    let path = format!("/dev/ttyS{number}");
    let file = File::options().write(true).open(&path).map_err(|e| format!("{path}: {e}"))?;
    // SAFETY: `termios` is plain data that tcgetattr fills before it is used.
    let failed = unsafe {
        let mut termios: libc::termios = std::mem::zeroed();
        libc::tcgetattr(file.as_raw_fd(), &raw mut termios) != 0 || {
            libc::cfmakeraw(&raw mut termios);
            libc::tcsetattr(file.as_raw_fd(), libc::TCSANOW, &raw const termios) != 0
        }
    };
    if failed { Err(format!("{path}: {}", io::Error::last_os_error())) } else { Ok(file) }
}

/// Waits until the host has every byte.
fn drain(port: &File) {
    // SAFETY: a call on an open descriptor; no memory is passed.
    unsafe { libc::tcdrain(port.as_raw_fd()) };
}

/// What the kernel's command line says to a module, as modprobe would pass it on:
/// each `MODULE.PARAMETER=VALUE`, where the module's name has `_` for `-`.
fn parameters(cmdline: &str, module: &str) -> String {
    let prefix = format!("{}.", module.replace('-', "_"));
    let own = cmdline.split_whitespace().filter_map(|word| word.strip_prefix(&prefix));
    own.collect::<Vec<_>>().join(" ")
}

fn load(path: &str, parameters: &str) -> Result<(), String> {
    let failed = |e| format!("load {path}: {e}");
    let module = File::open(path).map_err(failed)?;
    let parameters = CString::new(parameters).map_err(|e| failed(e.into()))?;
    // SAFETY: an open descriptor and a NUL-terminated string that outlives the call.
    let refused = unsafe {
        libc::syscall(libc::SYS_finit_module, module.as_raw_fd(), parameters.as_ptr(), 0)
    };
    match refused {
        0 => Ok(()),
        _ => Err(failed(io::Error::last_os_error())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_gets_its_own_parameters() {
        let cmdline = "quiet kvm_amd.npt=0 kvm.tdp_mmu=1 kvm_amd.avic=0 run=lab\n";
        assert_eq!(parameters(cmdline, "kvm-amd"), "npt=0 avic=0");
        assert_eq!(parameters(cmdline, "kvm"), "tdp_mmu=1");
        assert_eq!(parameters(cmdline, "irqbypass"), "");
    }
}
