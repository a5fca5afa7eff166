//! One run of the `vmm` binary, directly or in the lab: the same command line and
//! the same answer either way.

use crate::host::Kind;
use crate::lab::{Lab, LabError, tail};
use crate::progress::{Progress, SILENCE};
use crate::resources::{self, ResourceError};
use std::io::{self, Read};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use vmm::host::HostKind;

/// Where VMs may run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LabChoice {
    /// In the lab where this machine's KVM cannot run the guest.
    Auto,
    /// In the lab.
    Always,
    /// On this machine's KVM, whatever comes of it.
    Never,
}

/// What kind of guest is to run: it decides what KVM must be able to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Guest {
    /// A bare-metal program, for any KVM.
    Bare,
    /// A Linux kernel, which software KVM cannot interpret.
    Linux,
}

impl LabChoice {
    /// Where this guest runs: `true` in the lab.
    #[must_use]
    pub fn in_lab(self, guest: Guest) -> bool {
        match self {
            LabChoice::Always => true,
            LabChoice::Never => false,
            LabChoice::Auto => {
                vmm::host::open_kvm().is_err()
                    || guest == Guest::Linux && HostKind::detect() == HostKind::Software
            }
        }
    }
}

/// A VM to run.
#[derive(Debug, Clone)]
pub struct Vm {
    /// What it is for, in progress messages.
    pub name: String,
    /// Arguments of `vmm`; files by the names below. `--stats` is added.
    pub arguments: Vec<String>,
    /// Files: their name on the command line, and where they are.
    pub files: Vec<(String, PathBuf)>,
    /// From the start of `vmm` to its end, the lab's own boot not counted.
    pub timeout: Duration,
    /// Whether it runs in the lab.
    pub in_lab: bool,
    /// Whether the lab's KVM shadows page tables: see [`Lab::shadow_paging`].
    pub shadow_paging: bool,
}

/// What came of a run.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// Exit code of `vmm`.
    pub status: i32,
    /// The guest's console.
    pub console: String,
    /// What `vmm` itself said.
    pub stderr: String,
    /// What `--stats` wrote; null where nothing was.
    pub stats: serde_json::Value,
    /// What it ran on.
    pub kind: Kind,
    /// From the start of `vmm` to its end.
    pub elapsed: Duration,
}

/// Why there is no outcome.
#[derive(Debug, thiserror::Error)]
pub enum VmError {
    /// See the lab's words.
    #[error(transparent)]
    Lab(#[from] LabError),
    /// A script of `resources/`.
    #[error(transparent)]
    Resource(#[from] ResourceError),
    /// A file or program of this machine.
    #[error("{0}: {1}")]
    Host(String, #[source] io::Error),
    /// Two reports that have nothing in common.
    #[error("{0}")]
    Compare(String),
    /// It did not end in time.
    #[error("{name}: did not end within {seconds} s\n{tail}")]
    Timeout {
        /// Which VM.
        name: String,
        /// How long it had.
        seconds: u64,
        /// The console's last lines.
        tail: String,
    },
    /// It ended, but not as the experiment needs it.
    #[error("{name}: {what}\n{tail}")]
    Unexpected {
        /// Which VM.
        name: String,
        /// What is wrong.
        what: String,
        /// The console's last lines.
        tail: String,
    },
}

/// The kernel and the initramfs of Linux guests, and how `vmm` is told of them.
///
/// # Errors
/// The kernel cannot be fetched or the initramfs not built.
pub fn linux_files(progress: &mut Progress) -> Result<Vec<(String, PathBuf)>, VmError> {
    let kernel = resources::kernel(progress, None)?;
    let init = resources::program(progress, "init")?;
    let initramfs = init.with_file_name("guest.cpio");
    resources::initramfs(progress, &initramfs, &[("/init".into(), init)])?;
    Ok(vec![("bzImage".into(), kernel), ("initrd".into(), initramfs)])
}

/// The same for 32-bit Linux guests: Debian's kernel with PAE, and a C /init that
/// tells its clocksource, measures each and powers off.
///
/// # Errors
/// The kernel cannot be fetched or the initramfs not built.
pub fn linux32_files(progress: &mut Progress) -> Result<Vec<(String, PathBuf)>, VmError> {
    let kernel = resources::kernel(progress, Some("i386"))?;
    let init = resources::program(progress, "init32")?;
    let initramfs = init.with_file_name("guest32.cpio");
    resources::initramfs(progress, &initramfs, &[("/init".into(), init)])?;
    Ok(vec![("bzImage".into(), kernel), ("initrd".into(), initramfs)])
}

/// A program built beside this one: `vmm`, or a bare-metal guest.
///
/// # Errors
/// It has not been built.
pub fn sibling(name: &str) -> Result<PathBuf, VmError> {
    let here = std::env::current_exe().map_err(|e| VmError::Host("current program".into(), e))?;
    // Beside this program; a test runs one directory further down, in deps/, and
    // what it drives may be there in a release build only.
    let beside = here.ancestors().skip(1).take(2).map(|dir| dir.join(name));
    let release = here.ancestors().skip(2).take(2).map(|dir| dir.join("release").join(name));
    beside.chain(release).find(|path| path.is_file()).ok_or_else(|| {
        let hint = "not built: cargo build --release -p vmm -p guests builds it";
        VmError::Host(name.to_owned(), io::Error::new(io::ErrorKind::NotFound, hint))
    })
}

impl Vm {
    /// Runs it to its end.
    ///
    /// # Errors
    /// See [`VmError`]; a guest that fails is an outcome, not an error.
    pub fn run(&self) -> Result<Outcome, VmError> {
        if self.in_lab { self.run_in_lab() } else { self.run_here() }
    }

    /// Runs it, and takes only a guest that powered itself off.
    ///
    /// # Errors
    /// As [`Vm::run`], and any other ending.
    pub fn run_to_poweroff(&self) -> Result<Outcome, VmError> {
        let outcome = self.run()?;
        if outcome.status == 0 {
            return Ok(outcome);
        }
        Err(self.unexpected(&outcome, format!("vmm ended with {}", outcome.status)))
    }

    /// An outcome that will not do, with the end of what was said.
    #[must_use]
    pub fn unexpected(&self, outcome: &Outcome, what: String) -> VmError {
        VmError::Unexpected {
            name: self.name.clone(),
            what,
            tail: tail(format!("{}\n{}", outcome.console, outcome.stderr).as_bytes()),
        }
    }

    fn run_in_lab(&self) -> Result<Outcome, VmError> {
        const LAB_BOOT: Duration = Duration::from_secs(120);
        let quoted: Vec<String> = self.arguments.iter().map(|a| shell_quote(a)).collect();
        let mut lab = Lab::new(format!("vmm {} --stats out/stats.json", quoted.join(" ")));
        lab.files.clone_from(&self.files);
        lab.timeout = self.timeout + LAB_BOOT;
        lab.shadow_paging = self.shadow_paging;
        let output = lab.run()?;
        let stats = output
            .files
            .iter()
            .find(|(name, _)| name == "stats.json")
            .and_then(|(_, bytes)| serde_json::from_slice(bytes).ok())
            .unwrap_or_default();
        Ok(Outcome {
            status: output.status,
            console: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
            stats,
            kind: Kind::Lab,
            elapsed: output.elapsed,
        })
    }

    fn run_here(&self) -> Result<Outcome, VmError> {
        let host = |what: &str| {
            let what = what.to_owned();
            move |e| VmError::Host(what, e)
        };
        let directory = tempfile::tempdir().map_err(host("temporary directory"))?;
        for (name, file) in &self.files {
            let file = file.canonicalize().map_err(host(&file.display().to_string()))?;
            std::os::unix::fs::symlink(file, directory.path().join(name)).map_err(host(name))?;
        }
        let started = Instant::now();
        let mut child = Command::new(sibling("vmm")?)
            .args(&self.arguments)
            .args(["--stats", "stats.json"])
            .current_dir(directory.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(host("vmm"))?;
        let console = gather(child.stdout.take());
        let stderr = gather(child.stderr.take());
        let status = self.wait(&mut child, started)?;
        let (console, stderr) =
            (console.join().unwrap_or_default(), stderr.join().unwrap_or_default());
        let Some(status) = status else {
            let (name, seconds) = (self.name.clone(), self.timeout.as_secs());
            return Err(VmError::Timeout { name, seconds, tail: tail(console.as_bytes()) });
        };
        let stats = std::fs::read(directory.path().join("stats.json"))
            .ok()
            .and_then(|bytes| serde_json::from_slice(&bytes).ok())
            .unwrap_or_default();
        let (kind, elapsed) = (Kind::Direct(HostKind::detect()), started.elapsed());
        Ok(Outcome { status, console, stderr, stats, kind, elapsed })
    }

    /// The exit status, or `None` where the time ran out.
    fn wait(&self, child: &mut Child, started: Instant) -> Result<Option<i32>, VmError> {
        use std::os::unix::process::ExitStatusExt;
        let mut progress = Progress::new(true);
        progress.next(&format!("{}: running vmm", self.name));
        let host = |e| VmError::Host("vmm".into(), e);
        let mut next_word = started + SILENCE;
        loop {
            if let Some(status) = child.try_wait().map_err(host)? {
                progress.done();
                let signal = || 128 + status.signal().unwrap_or(0);
                return Ok(Some(status.code().unwrap_or_else(signal)));
            }
            if started.elapsed() > self.timeout {
                child.kill().and_then(|()| child.wait()).map_err(host)?;
                return Ok(None);
            }
            if Instant::now() > next_word {
                progress.remind();
                next_word += SILENCE;
            }
            // A child's end is no descriptor here; 10 ms is nothing beside a VM's life.
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

fn gather(stream: Option<impl Read + Send + 'static>) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut stream) = stream {
            let _ = stream.read_to_end(&mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// Quotes one word for /bin/sh.
pub(crate) fn shell_quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_survive_the_shell() {
        for word in ["a b", "it's", "$HOME", "a\"b", ""] {
            let printed = Command::new("sh")
                .args(["-c", &format!("printf %s {}", shell_quote(word))])
                .output()
                .unwrap();
            assert_eq!(printed.stdout, word.as_bytes());
        }
    }
}
