//! How long a Linux guest takes to start, timed from outside: the same kernel,
//! initramfs and command line under `vmm` and under a peer VMM.

use super::linux_files;
use crate::host::Kind;
use crate::lab::{Lab, Port, tail};
use crate::progress::Progress;
use crate::vm::{VmError, shell_quote, sibling};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use vmm::host::HostKind;

/// loglevel=6 lets the kernel's banner and little else through: a first byte without
/// a console full of them, each an exit. /init's first line follows its mounts.
const CMDLINE: &str = "console=ttyS0 earlyprintk=ttyS0 loglevel=6 panic=-1 run=clocksource,reboot";
const MEMORY_MIB: &str = "256";
/// How /init's first line begins.
const INIT_LINE: &[u8] = b"@result ";
/// What the lab prints before it starts the contestant.
const START_LINE: &[u8] = b"start\n";
const PATIENCE: Duration = Duration::from_secs(180);
const LAB_BOOT: Duration = Duration::from_secs(120);

/// A VMM, and how it is told to boot Linux.
#[derive(Debug, Clone)]
pub struct Contestant {
    /// For the table.
    pub who: &'static str,
    program: PathBuf,
    arguments: Vec<String>,
    /// Names on its command line that are files here.
    files: Vec<(String, PathBuf)>,
    in_lab: bool,
}

/// When things were seen, in ms from the VMM's start.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Times {
    /// The first byte on the console.
    pub first_byte_ms: f64,
    /// The first line of /init.
    pub init_ms: f64,
}

/// `vmm` by both ways of unpacking, and the peer where it is installed.
///
/// # Errors
/// The kernel cannot be fetched, or something of ours has not been built.
pub fn contestants(
    in_lab: bool,
    vmm_arguments: &[String],
    peer: &str,
) -> Result<Vec<Contestant>, VmError> {
    let linux = linux_files()?;
    // The lab brings a static `vmm` of its own.
    let ours = if in_lab { PathBuf::from("vmm") } else { sibling("vmm")? };
    let boot = |who, boot| {
        let words =
            ["--kernel", "bzImage", "--initrd", "initrd", "--cmdline", CMDLINE, "--boot", boot];
        let mut arguments = words.map(str::to_owned).to_vec();
        arguments.extend(["--memory".to_owned(), format!("{MEMORY_MIB}M")]);
        arguments.extend(vmm_arguments.iter().cloned());
        let (program, files) = (ours.clone(), linux.clone());
        Contestant { who, program, arguments, files, in_lab }
    };
    let mut all = vec![boot("vmm --boot payload", "payload"), boot("vmm --boot setup", "setup")];
    if let Some((program, firmware)) = find_peer(peer) {
        let machine = "microvm,accel=kvm,rtc=on,isa-serial=on";
        let words: &[&[&str]] = &[
            &["-M", machine, "-cpu", "host", "-m", MEMORY_MIB, "-nodefaults", "-no-user-config"],
            &["-display", "none", "-no-reboot", "-serial", "stdio"],
            &["-kernel", "bzImage", "-initrd", "initrd", "-append", CMDLINE],
        ];
        let mut arguments: Vec<String> = words.concat().into_iter().map(str::to_owned).collect();
        let mut files = linux.clone();
        if in_lab {
            arguments.extend(["-L".to_owned(), ".".to_owned()]);
            files.push((peer.to_owned(), program));
            files.extend(firmware);
        }
        let program = PathBuf::from(peer);
        all.push(Contestant { who: "QEMU microvm", program, arguments, files, in_lab });
    }
    Ok(all)
}

/// The peer's program, and the firmware that its `microvm` boots Linux with.
fn find_peer(name: &str) -> Option<(PathBuf, Vec<(String, PathBuf)>)> {
    let path = std::env::var_os("PATH")?;
    let program = std::env::split_paths(&path).map(|dir| dir.join(name)).find(|p| p.is_file())?;
    let said = Command::new(&program).args(["-L", "help"]).output().ok()?.stdout;
    let said = String::from_utf8_lossy(&said).into_owned();
    let firmware = ["bios-microvm.bin", "linuxboot_dma.bin"].map(|name| {
        let found = said.lines().map(|dir| Path::new(dir).join(name)).find(|file| file.is_file());
        found.map(|file| (name.to_owned(), file))
    });
    Some((program, firmware.into_iter().flatten().collect()))
}

impl Contestant {
    /// What it runs on.
    #[must_use]
    pub fn kind(&self) -> Kind {
        if self.in_lab { Kind::Lab } else { Kind::Direct(HostKind::detect()) }
    }

    /// Boots Linux once.
    ///
    /// # Errors
    /// A guest whose /init does not come to speak.
    pub fn run(&self) -> Result<Times, VmError> {
        let console = if self.in_lab { self.run_in_lab()? } else { self.run_here()? };
        console.times().ok_or_else(|| VmError::Unexpected {
            name: self.who.to_owned(),
            what: "nothing from /init".into(),
            tail: tail(&console.text),
        })
    }

    fn run_in_lab(&self) -> Result<Console, VmError> {
        let words = [self.program.display().to_string()];
        let words = words.iter().chain(&self.arguments).map(|word| shell_quote(word));
        let command = words.collect::<Vec<_>>().join(" ");
        let mut lab = Lab::new(format!("echo start; timeout {} {command}", PATIENCE.as_secs()));
        lab.files.clone_from(&self.files);
        lab.timeout = PATIENCE + LAB_BOOT;
        let mut console = Console::default();
        let output = lab.run_with(|port, bytes| match port {
            Port::Stdout => console.heard(bytes),
            Port::Console | Port::Stderr => {}
        })?;
        console.text.extend(output.stderr);
        Ok(console)
    }

    fn run_here(&self) -> Result<Console, VmError> {
        let failed = |e| VmError::Host(self.program.display().to_string(), e);
        let mut progress = Progress::new(true);
        progress.next(&format!("Linux under {}", self.who));
        let mut command = Command::new("timeout");
        command.arg(PATIENCE.as_secs().to_string()).arg(&self.program);
        for word in &self.arguments {
            match self.files.iter().find(|(name, _)| name == word) {
                Some((_, path)) => command.arg(path),
                None => command.arg(word),
            };
        }
        let mut console = Console::default();
        console.heard(START_LINE);
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(failed)?;
        let mut pipe = child.stdout.take().ok_or_else(|| failed(io::Error::other("no pipe")))?;
        let mut buffer = [0; 4096];
        loop {
            match pipe.read(&mut buffer).map_err(failed)? {
                0 => break,
                length => console.heard(&buffer[..length]),
            }
        }
        child.wait().map_err(failed)?;
        progress.done();
        Ok(console)
    }
}

/// A console's text, and when its landmarks came.
#[derive(Debug, Default)]
struct Console {
    text: Vec<u8>,
    started: Option<Instant>,
    first_byte: Option<Instant>,
    init: Option<Instant>,
}

impl Console {
    fn heard(&mut self, bytes: &[u8]) {
        let now = Instant::now();
        self.text.extend_from_slice(bytes);
        if self.started.is_none() && self.text.starts_with(START_LINE) {
            self.started = Some(now);
        }
        if self.first_byte.is_none() && self.text.len() > START_LINE.len() {
            self.first_byte = Some(now);
        }
        let has_init = || self.text.windows(INIT_LINE.len()).any(|window| window == INIT_LINE);
        if self.init.is_none() && has_init() {
            self.init = Some(now);
        }
    }

    fn times(&self) -> Option<Times> {
        let since = |at: Option<Instant>| Some((at? - self.started?).as_secs_f64() * 1e3);
        Some(Times { first_byte_ms: since(self.first_byte)?, init_ms: since(self.init)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn landmarks_are_found_however_the_bytes_are_cut() {
        let mut console = Console::default();
        console.heard(b"sta");
        assert!(console.started.is_none());
        console.heard(b"rt\n");
        assert!(console.started.is_some() && console.first_byte.is_none());
        console.heard(b"[ 0.0] Linux version\n@res");
        assert!(console.first_byte.is_some() && console.times().is_none());
        console.heard(b"ult {}\n");
        let times = console.times().expect("all landmarks");
        assert!(0.0 <= times.first_byte_ms && times.first_byte_ms <= times.init_ms);
    }
}
