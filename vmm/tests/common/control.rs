//! A client of the control socket.
#![allow(dead_code)] // each test file uses a part

use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

pub struct Client(BufReader<UnixStream>);

impl Client {
    /// Connects as soon as somebody listens there.
    pub fn connect(path: &Path) -> Self {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            match UnixStream::connect(path) {
                Ok(stream) => {
                    // A machine that is stuck is a failure, not a test without an end.
                    let patience = Some(Duration::from_secs(60));
                    stream.set_read_timeout(patience).expect("a timeout");
                    return Self(BufReader::new(stream));
                }
                Err(e) => assert!(Instant::now() < deadline, "{}: {e}", path.display()),
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// The answer to a command; `None` when the machine has ended.
    pub fn ask(&mut self, command: &str) -> Option<Value> {
        self.ask_with(command, "")
    }

    /// The same, with this behind the command: `,"cpu":1`.
    pub fn ask_with(&mut self, command: &str, more: &str) -> Option<Value> {
        let line = format!("{{\"command\":\"{command}\"{more}}}\n");
        self.0.get_mut().write_all(line.as_bytes()).ok()?;
        let mut answer = String::new();
        self.0.read_line(&mut answer).ok().filter(|n| *n > 0)?;
        let answer: Value = serde_json::from_str(&answer).expect("JSON");
        Some(answer.get("ok").unwrap_or_else(|| panic!("{answer}")).clone())
    }

    /// The guest's reference time.
    pub fn reference(&mut self) -> Option<u64> {
        self.ask("status")?["reference_100ns"].as_u64()
    }
}
