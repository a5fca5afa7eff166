//! The other end of `vmm --control`: what experiments do to a running guest.

use serde_json::Value;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use vmm::control::Command;

/// A connection to a running `vmm`.
#[derive(Debug)]
pub struct Client {
    stream: UnixStream,
    answers: BufReader<UnixStream>,
}

impl Client {
    /// Connects; waits up to `patience` for the socket to appear.
    ///
    /// # Errors
    /// What the last attempt said.
    pub fn connect(path: &Path, patience: Duration) -> io::Result<Self> {
        let since = Instant::now();
        loop {
            match UnixStream::connect(path) {
                Ok(stream) => {
                    stream.set_read_timeout(Some(Duration::from_secs(60)))?;
                    let answers = BufReader::new(stream.try_clone()?);
                    return Ok(Self { stream, answers });
                }
                Err(e) if since.elapsed() > patience => return Err(e),
                // A socket's appearance in a directory is not worth an inotify.
                Err(_) => std::thread::sleep(Duration::from_millis(2)),
            }
        }
    }

    /// Sends all commands at once and returns an answer for each; `None` when the
    /// machine has ended.
    ///
    /// # Errors
    /// A command that the machine refuses, in its words.
    pub fn send(&mut self, commands: &[Command]) -> Result<Option<Vec<Value>>, String> {
        let mut lines = Vec::new();
        for command in commands {
            serde_json::to_writer(&mut lines, command).map_err(|e| e.to_string())?;
            lines.push(b'\n');
        }
        if self.stream.write_all(&lines).is_err() {
            return Ok(None);
        }
        let mut answers = Vec::with_capacity(commands.len());
        for _ in commands {
            let mut line = String::new();
            match self.answers.read_line(&mut line) {
                Ok(n) if n > 0 => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    return Err("the control socket: no answer for a minute".into());
                }
                _ => return Ok(None),
            }
            let answer: Value = serde_json::from_str(&line).map_err(|e| e.to_string())?;
            match answer.get("ok") {
                Some(value) => answers.push(value.clone()),
                None => return Err(format!("the control socket: {}", answer["error"])),
            }
        }
        Ok(Some(answers))
    }
}

/// What was done to a machine until it ended.
#[derive(Debug, Clone, Copy, Default)]
pub struct Driven {
    /// Rounds of commands that it answered.
    pub rounds: u64,
    /// From the first command to the last answer.
    pub elapsed: Duration,
}

impl Driven {
    /// Rounds a second.
    #[must_use]
    pub fn hz(&self) -> f64 {
        self.rounds as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }
}

/// When to begin to act on a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begin {
    /// As soon as it takes commands.
    AtOnce,
    /// When its guest has enabled the TSC page, and so is past its boot code.
    WithPage,
}

/// Sends `round` again and again, each time after the last was answered, until the
/// machine at `socket` has ended.
///
/// # Errors
/// No machine within `patience`, or a command that it refuses.
pub fn drive(
    socket: &Path,
    patience: Duration,
    begin: Begin,
    round: &[Command],
) -> Result<Driven, String> {
    let connected = Client::connect(socket, patience);
    let mut client = connected.map_err(|e| format!("{}: {e}", socket.display()))?;
    if begin == Begin::WithPage {
        // The machine's answer paces the loop; it has ended where there is none.
        while client.send(&[Command::Stats {}])?.is_some_and(|a| !wrote_page_msr(&a[0])) {}
    }
    let (mut driven, start) = (Driven::default(), Instant::now());
    while client.send(round)?.is_some() {
        driven.rounds += 1;
        driven.elapsed = start.elapsed();
    }
    Ok(driven)
}

fn wrote_page_msr(exits: &Value) -> bool {
    let msrs = exits["msrs"].as_array().map(Vec::as_slice).unwrap_or_default();
    msrs.iter().any(|row| row["name"] == "0x40000021" && row["writes"]["count"] != 0)
}

/// A place for a socket, and the directory that goes with it.
///
/// # Errors
/// No temporary directory.
pub fn place() -> io::Result<(tempfile::TempDir, PathBuf)> {
    let directory = tempfile::tempdir()?;
    let socket = directory.path().join("control");
    Ok((directory, socket))
}
