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

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// Longest time without a word to the user.
const SILENCE: Duration = Duration::from_secs(4);
/// Lines of the console that explain a failure.
const TAIL_LINES: usize = 25;
/// More than this from one port is a guest gone wild; the rest is dropped.
const MAX_PORT_BYTES: usize = 256 << 20;

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
    #[error("lab: {0} failed: see its message above")]
    Resource(String),
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

enum Event {
    Bytes(Port, Vec<u8>),
    Step(String),
    Begin,
    Exit(i32),
    File(String, Vec<u8>),
    QemuSaid(Vec<u8>),
    /// QEMU closed its own standard error: it has ended.
    QemuEnded,
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
        let mut steps = Steps::new(self.progress);
        let directory = tempfile::Builder::new()
            .prefix("lab-")
            .tempdir()
            .map_err(|e| LabError::Host("temporary directory".into(), e))?;
        let kernel = resource(&mut steps, "kernel", &["stable".into()])?;
        let initramfs = self.pack(&mut steps, directory.path(), &kernel)?;
        steps.next("booting the lab");
        let (events, mut machine) = self.start(directory.path(), &kernel, &initramfs)?;
        self.follow(&events, &mut steps, &mut machine, &mut sink)
    }

    fn pack(
        &self,
        steps: &mut Steps,
        directory: &Path,
        kernel: &Path,
    ) -> Result<PathBuf, LabError> {
        let init = resource(steps, "program", &["init".into()])?;
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
            contents.push(("/work/vmm".into(), resource(steps, "program", &["vmm".into()])?));
        }

        let initramfs = directory.join("initramfs");
        let mut arguments = vec![initramfs.display().to_string()];
        arguments.extend(contents.iter().map(|(path, file)| format!("{path}={}", file.display())));
        resource(steps, "initramfs", &arguments)?;
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
            .args(["-accel", "tcg,thread=single", "-smp", "1", "-cpu", "max,+svm,+invtsc"])
            .args(["-m", &self.memory_mib.to_string()])
            .args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"])
            .arg("-kernel")
            .arg(kernel)
            .arg("-initrd")
            .arg(initramfs)
            // KVM's own reference page stays invalid unless the TSC is the clocksource.
            .args(["-append", "console=ttyS0 panic=-1 quiet tsc=reliable clocksource=tsc run=lab"]);

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
        steps: &mut Steps,
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
                    if port != Port::Console {
                        steps.heard();
                    }
                    sink(port, &bytes);
                }
                Ok(Event::Step(words)) => steps.next(&words),
                Ok(Event::Begin) => {
                    begun = Some(Instant::now());
                    steps.next("running the command in the lab");
                }
                Ok(Event::Exit(code)) => {
                    (ended, status) = (Some(Instant::now()), Some(code));
                    steps.next("reading the result files");
                }
                Ok(Event::File(name, bytes)) => files.push((name, bytes)),
                Ok(Event::QemuSaid(words)) => console.extend_from_slice(&words),
                // Waiting threads, if any, must see that nobody will call.
                Ok(Event::QemuEnded) => machine.release_listeners(),
                Err(RecvTimeoutError::Timeout) if Instant::now() < deadline => steps.remind(),
                Err(RecvTimeoutError::Timeout) => {
                    let heard = [&console, &stdout, &stderr];
                    return Err(LabError::Timeout {
                        step: steps.name.clone(),
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
                steps.done();
                let (boot, elapsed) = (begun - started, ended - begun);
                Ok(Output { status, stdout, stderr, files, boot, elapsed })
            }
            _ => Err(LabError::Ended { step: steps.name.clone(), tail: tail(&console) }),
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

/// Passes bytes on as they come.
fn pump(
    mut from: impl Read,
    to: &Sender<Event>,
    wrap: impl Fn(Vec<u8>) -> Event,
) -> io::Result<()> {
    let mut buffer = [0; 4096];
    loop {
        match from.read(&mut buffer)? {
            0 => return Ok(()),
            length => {
                if to.send(wrap(buffer[..length].to_vec())).is_err() {
                    return Ok(());
                }
            }
        }
    }
}

/// Reads the protocol's lines and files to the end of the machine.
fn protocol(stream: UnixStream, to: &Sender<Event>) -> io::Result<()> {
    let mut stream = BufReader::new(stream);
    let mut line = String::new();
    while stream.read_line(&mut line)? > 0 {
        let (word, rest) = line.trim_end().split_once(' ').unwrap_or((line.trim_end(), ""));
        let event = match word {
            "step" => Event::Step(rest.to_owned()),
            "begin" => Event::Begin,
            "exit" => Event::Exit(rest.parse().unwrap_or(255)),
            "file" => {
                let (size, name) = rest.split_once(' ').unwrap_or((rest, ""));
                let size: u64 = size.parse().map_err(io::Error::other)?;
                let mut bytes = Vec::new();
                stream.by_ref().take(size.min(MAX_PORT_BYTES as u64)).read_to_end(&mut bytes)?;
                Event::File(name.to_owned(), bytes)
            }
            _ => Event::Step("turning the lab off".into()),
        };
        if to.send(event).is_err() {
            return Ok(());
        }
        line.clear();
    }
    Ok(())
}

/// Runs a script of `resources/`; returns the path that it prints, if any.
fn resource(steps: &mut Steps, script: &str, arguments: &[String]) -> Result<PathBuf, LabError> {
    let first = arguments.first().map_or("", String::as_str);
    let what = format!("resources/{script} {first}");
    steps.next(&what);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../resources").join(script);
    let failed = |e| LabError::Host(path.display().to_string(), e);
    let mut child = Command::new(&path)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    // The script's end of the pipe closes when it ends; until then say so.
    let (sender, lines) = channel();
    if let Some(mut out) = child.stdout.take() {
        std::thread::spawn(move || {
            let mut text = String::new();
            let _ = out.read_to_string(&mut text).map(|_| sender.send(text));
        });
    }
    let text = loop {
        match lines.recv_timeout(SILENCE) {
            Ok(text) => break text,
            Err(RecvTimeoutError::Timeout) => steps.remind(),
            Err(RecvTimeoutError::Disconnected) => break String::new(),
        }
    };
    match child.wait().map_err(failed)?.success() {
        true => Ok(PathBuf::from(text.trim_end())),
        false => Err(LabError::Resource(what)),
    }
}

/// Says which step runs, and every few seconds for how long.
struct Steps {
    speak: bool,
    name: String,
    since: Instant,
    last_word: Instant,
}

impl Steps {
    fn new(speak: bool) -> Self {
        let now = Instant::now();
        Self { speak, name: String::new(), since: now, last_word: now }
    }

    fn next(&mut self, name: &str) {
        self.done();
        self.name = name.to_owned();
        self.since = Instant::now();
        self.say(&format!("lab: {name}"));
    }

    fn done(&mut self) {
        if self.since.elapsed() >= SILENCE {
            self.say(&format!("lab: {}: done in {:.1} s", self.name, self.seconds()));
        }
    }

    /// Called when the user sees that something happens.
    fn heard(&mut self) {
        self.last_word = Instant::now();
    }

    fn remind(&mut self) {
        if self.last_word.elapsed() >= SILENCE {
            self.say(&format!("lab: {}: {:.0} s", self.name, self.seconds()));
        }
    }

    fn seconds(&self) -> f64 {
        self.since.elapsed().as_secs_f64()
    }

    fn say(&mut self, words: &str) {
        if self.speak {
            // A closed standard error must not end the run.
            let _ = writeln!(io::stderr(), "{words}");
        }
        self.last_word = Instant::now();
    }
}

fn tail(bytes: &[u8]) -> String {
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
    fn the_protocol_carries_status_and_binary_files() {
        let (mut guest, host) = UnixStream::pair().unwrap();
        guest
            .write_all(b"step loading KVM\nbegin\nexit 33\nfile 5 a b.bin\n\n\0\xffx\nend\n")
            .unwrap();
        drop(guest);
        let (sender, events) = channel();
        protocol(host, &sender).unwrap();
        drop(sender);
        let events: Vec<Event> = events.iter().collect();
        assert!(matches!(&events[0], Event::Step(words) if words == "loading KVM"));
        assert!(matches!(events[1], Event::Begin));
        assert!(matches!(events[2], Event::Exit(33)));
        assert!(
            matches!(&events[3], Event::File(name, bytes) if name == "a b.bin" && bytes == b"\n\0\xffx\n")
        );
        assert_eq!(events.len(), 5);
    }

    #[test]
    fn the_tail_is_the_last_lines() {
        let text: String = (0..100).map(|n| format!("{n}\r\n")).collect();
        let tail = tail(text.as_bytes());
        assert_eq!(tail.lines().count(), TAIL_LINES);
        assert!(tail.ends_with("  | 99"));
    }
}
