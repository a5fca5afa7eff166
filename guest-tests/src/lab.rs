//! The lab: an emulated machine with SVM, so that Linux guests run under our VMM
//! where the host's own KVM is absent or is software.
//!
//! QEMU's TCG runs a stock Debian kernel with its KVM modules; our init (job
//! `lab`) runs one command in it and sends everything back over serial ports,
//! each connected to a Unix socket of ours: the kernel's console, the command's
//! standard output, its standard error, and a protocol of `step WORDS`, `begin`,
//! `exit STATUS`, `file SIZE NAME` with SIZE bytes, and `end`.
//!
//! Figures from here are "nested, emulated": functions are proved, and ratios
//! exaggerated.

mod ports;

use crate::progress::{Progress, SILENCE};
use crate::resources::{self, ResourceError};
use ports::{Event, MAX_PORT_BYTES, protocol, pump};
use std::fs::{self, File};
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// Lines of the console that explain a failure.
const TAIL_LINES: usize = 25;

/// Word on the lab kernel's command line.
///
/// TCG sets the accessed bit in the page-directory-pointer entries of 32-bit PAE
/// paging, where bits 5 to 8 are reserved (AMD APM 2 §5.2.3) and a CPU leaves them
/// alone. With nested paging those are the guest's own entries, and KVM refuses
/// them when it loads them again: Debian's 686-pae kernel gets #GP from the write
/// that sets CR4.PGE. With shadow paging they are KVM's, and the kernel boots.
const SHADOW_PAGING: &str = "kvm_amd.npt=0";

/// One command to run in the lab.
#[derive(Debug, Clone)]
pub struct Lab {
    /// Given to /bin/sh, in the directory where the files are.
    pub command: String,
    /// Files to have there: the name inside, and the file on this machine.
    /// `vmm` is added where it is not among them.
    pub files: Vec<(String, PathBuf)>,
    /// From QEMU's start to its end.
    pub timeout: Duration,
    /// RAM of the emulated machine. Guests live inside it.
    pub memory_mib: u32,
    /// Whether the machine's clocks count its instructions, 1 ns each, and skip
    /// what it idles, instead of following this host's: then a time measured in it
    /// does not depend on what else runs here. Guests of four vCPUs and more have
    /// been seen to spin for ever in it.
    pub virtual_time: bool,
    /// Whether KVM shadows guests' page tables instead of nesting them: what 32-bit
    /// guests with PAE need, see [`SHADOW_PAGING`].
    pub shadow_paging: bool,
    /// Whether to say on standard error which step runs and for how long.
    pub progress: bool,
}

/// What came of it.
#[derive(Debug, Clone)]
pub struct Output {
    /// The command's exit status; 128 + N after signal N.
    pub status: i32,
    /// Its standard output.
    pub stdout: Vec<u8>,
    /// Its standard error.
    pub stderr: Vec<u8>,
    /// The files that it left in `out/`: name and content.
    pub files: Vec<(String, Vec<u8>)>,
    /// From QEMU's start to the command's.
    pub boot: Duration,
    /// From the command's start to its end, by this machine's clock.
    pub elapsed: Duration,
}

/// Why there is no output.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// A helper of `resources/` failed; its own words are on standard error.
    #[error("lab: {0}")]
    Resource(#[from] ResourceError),
    /// A file or program of this machine.
    #[error("lab: {0}: {1}")]
    Host(String, #[source] io::Error),
    /// The command did not end in time.
    #[error("lab: {step} did not end within {seconds} s: raise the lab's timeout\n{tail}")]
    Timeout {
        /// What it was doing.
        step: String,
        /// The timeout.
        seconds: u64,
        /// The end of what was last said, on whichever port.
        tail: String,
    },
    /// The emulated machine ended before the command did.
    #[error("lab: the machine ended during: {step}\n{tail}")]
    Ended {
        /// What it was doing.
        step: String,
        /// The end of the console and of QEMU's own words.
        tail: String,
    },
}

/// Where bytes come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Port {
    /// The lab kernel's console.
    Console,
    /// The command's standard output.
    Stdout,
    /// The command's standard error.
    Stderr,
}

impl Lab {
    /// A lab for `command`: 3 GiB and 5 minutes.
    #[must_use]
    pub fn new(command: impl Into<String>) -> Self {
        Self {
            command: command.into(),
            files: Vec::new(),
            timeout: Duration::from_secs(300),
            memory_mib: 3072,
            virtual_time: false,
            shadow_paging: false,
            progress: true,
        }
    }

    /// Runs the command and gathers its output.
    ///
    /// # Errors
    /// See [`LabError`]; a command that fails is not an error.
    pub fn run(&self) -> Result<Output, LabError> {
        self.run_with(|_, _| {})
    }

    /// Runs the command; `sink` also sees each piece of output as it comes.
    ///
    /// # Errors
    /// See [`LabError`]; a command that fails is not an error.
    pub fn run_with(&self, mut sink: impl FnMut(Port, &[u8])) -> Result<Output, LabError> {
        let mut progress = Progress::new(self.progress);
        let directory = tempfile::Builder::new()
            .prefix("lab-")
            .tempdir()
            .map_err(|e| LabError::Host("temporary directory".into(), e))?;
        let kernel = resources::kernel(&mut progress, Some("stable"))?;
        let initramfs = self.pack(&mut progress, directory.path(), &kernel)?;
        progress.next("booting the lab");
        let (events, mut machine) = self.start(directory.path(), &kernel, &initramfs)?;
        self.follow(&events, &mut progress, &mut machine, &mut sink)
    }

    fn pack(
        &self,
        progress: &mut Progress,
        directory: &Path,
        kernel: &Path,
    ) -> Result<PathBuf, LabError> {
        let init = resources::program(progress, "init")?;
        let command = directory.join("command");
        fs::write(&command, &self.command)
            .map_err(|e| LabError::Host(command.display().to_string(), e))?;

        let mut contents = vec![("/init".to_owned(), init), ("/lab/command".into(), command)];
        for module in ["irqbypass.ko", "kvm.ko", "kvm-amd.ko"] {
            let file = kernel.with_file_name("modules").join(module);
            contents.push((format!("/lab/modules/{module}"), file));
        }
        for (name, file) in &self.files {
            File::open(file).map_err(|e| LabError::Host(file.display().to_string(), e))?;
            contents.push((format!("/work/{name}"), file.clone()));
        }
        if !self.files.iter().any(|(name, _)| name == "vmm") {
            contents.push(("/work/vmm".into(), resources::program(progress, "vmm")?));
        }

        let initramfs = directory.join("initramfs");
        resources::initramfs(progress, &initramfs, &contents)?;
        Ok(initramfs)
    }

    /// Starts QEMU with its serial ports on sockets, and a thread for each.
    fn start(
        &self,
        directory: &Path,
        kernel: &Path,
        initramfs: &Path,
    ) -> Result<(Receiver<Event>, Machine), LabError> {
        let (sender, events) = channel();
        // setpriv: the emulator must not outlive us, however we end.
        let mut qemu = Command::new("setpriv");
        qemu.args(["--pdeathsig", "KILL", "qemu-system-x86_64"])
            // More than one emulating thread or CPU corrupts nested guests' memory.
            .args(["-accel", "tcg,thread=single", "-smp", "1"])
            // TCG does not intercept XSETBV, so KVM never learns a guest's XCR0 and
            // the guest finds CPUID.0xD inconsistent: better no XSAVE at all.
            .args(["-cpu", "max,+svm,+invtsc,-xsave,-erms,-fsrm"])
            .args(["-m", &self.memory_mib.to_string()])
            .args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"])
            .arg("-kernel")
            .arg(kernel)
            .arg("-initrd")
            .arg(initramfs)
            // KVM's own reference page stays invalid unless the TSC is the clocksource.
            // On a busy host the timer's check may miss its ticks, and the kernel panics.
            .args([
                "-append",
                &format!(
                    "console=ttyS0 panic=-1 quiet tsc=reliable clocksource=tsc no_timer_check {} \
                     run=lab",
                    if self.shadow_paging { SHADOW_PAGING } else { "" }
                ),
            ]);

        if self.virtual_time {
            qemu.args(["-icount", "shift=0,sleep=off"]);
        }
        let mut sockets = Vec::new();
        for port in [Some(Port::Console), Some(Port::Stdout), Some(Port::Stderr), None] {
            let path = directory.join(format!("port{}", sockets.len()));
            let listener = UnixListener::bind(&path)
                .map_err(|e| LabError::Host(path.display().to_string(), e))?;
            let id = format!("port{}", sockets.len());
            qemu.args(["-chardev", &format!("socket,id={id},path={}", path.display())])
                .args(["-serial", &format!("chardev:{id}")]);
            let sender = sender.clone();
            std::thread::spawn(move || {
                // An error here is the machine's end, which is noticed elsewhere.
                let _ = listener.accept().and_then(|(stream, _)| match port {
                    Some(port) => pump(stream, &sender, |bytes| Event::Bytes(port, bytes)),
                    None => protocol(stream, &sender),
                });
            });
            sockets.push(path);
        }

        let mut child = qemu
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|e| LabError::Host("setpriv qemu-system-x86_64".into(), e))?;
        if let Some(words) = child.stderr.take() {
            std::thread::spawn(move || {
                let _ = pump(words, &sender, Event::QemuSaid);
                let _ = sender.send(Event::QemuEnded);
            });
        }
        Ok((events, Machine { child, sockets }))
    }

    fn follow(
        &self,
        events: &Receiver<Event>,
        progress: &mut Progress,
        machine: &mut Machine,
        sink: &mut impl FnMut(Port, &[u8]),
    ) -> Result<Output, LabError> {
        let started = Instant::now();
        let deadline = started + self.timeout;
        let (mut begun, mut ended, mut status) = (None, None, None);
        let (mut console, mut stdout, mut stderr) = (Vec::new(), Vec::new(), Vec::new());
        let mut files = Vec::new();
        loop {
            let until_deadline = deadline.saturating_duration_since(Instant::now());
            match events.recv_timeout(until_deadline.min(SILENCE)) {
                Ok(Event::Bytes(port, bytes)) => {
                    let seen = match port {
                        Port::Console => &mut console,
                        Port::Stdout => &mut stdout,
                        Port::Stderr => &mut stderr,
                    };
                    if seen.len() < MAX_PORT_BYTES {
                        seen.extend_from_slice(&bytes);
                    }
                    match port {
                        Port::Console => progress.remind(),
                        Port::Stdout | Port::Stderr => progress.heard(),
                    }
                    sink(port, &bytes);
                }
                Ok(Event::Step(words)) => progress.next(&words),
                Ok(Event::Begin) => {
                    begun = Some(Instant::now());
                    progress.next("running the command in the lab");
                }
                Ok(Event::Exit(code)) => {
                    (ended, status) = (Some(Instant::now()), Some(code));
                    progress.next("reading the result files");
                }
                Ok(Event::File(name, bytes)) => files.push((name, bytes)),
                Ok(Event::QemuSaid(words)) => console.extend_from_slice(&words),
                // Waiting threads, if any, must see that nobody will call.
                Ok(Event::QemuEnded) => machine.release_listeners(),
                Err(RecvTimeoutError::Timeout) if Instant::now() < deadline => progress.remind(),
                Err(RecvTimeoutError::Timeout) => {
                    let heard = [&console, &stdout, &stderr];
                    return Err(LabError::Timeout {
                        step: progress.step().to_owned(),
                        seconds: self.timeout.as_secs(),
                        tail: tail(&heard.map(|bytes| bytes.as_slice()).join(&b'\n')),
                    });
                }
                // Every port is at its end.
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        match (begun, ended, status) {
            (Some(begun), Some(ended), Some(status)) => {
                progress.done();
                let (boot, elapsed) = (begun - started, ended - begun);
                Ok(Output { status, stdout, stderr, files, boot, elapsed })
            }
            _ => Err(LabError::Ended { step: progress.step().to_owned(), tail: tail(&console) }),
        }
    }
}

/// The QEMU process; ends with its owner.
struct Machine {
    child: Child,
    sockets: Vec<PathBuf>,
}

impl Machine {
    fn release_listeners(&self) {
        for socket in &self.sockets {
            // Fails where QEMU had called already, and then nobody waits.
            let _ = UnixStream::connect(socket);
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Both fail only where the process has ended and been waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.release_listeners();
    }
}

/// The last lines of a console, for a failure's message.
#[must_use]
pub fn tail(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let lines: Vec<&str> = text.lines().collect();
    let last = &lines[lines.len().saturating_sub(TAIL_LINES)..];
    let quoted: Vec<String> =
        last.iter().map(|line| format!("  | {}", line.trim_end_matches('\r'))).collect();
    quoted.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tail_is_the_last_lines() {
        let text: String = (0..100).map(|n| format!("{n}\r\n")).collect();
        let tail = tail(text.as_bytes());
        assert_eq!(tail.lines().count(), TAIL_LINES);
        assert!(tail.ends_with("  | 99"));
    }
}
