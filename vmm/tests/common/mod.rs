//! Drives the real binary.
#![allow(dead_code, missing_docs)] // each test file uses a part

pub mod image;

use std::io::Read;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// What a run came to.
#[derive(Debug)]
pub struct Outcome {
    pub status: i32,
    pub stdout: String,
    pub stderr: String,
    pub elapsed: Duration,
}

/// The binary under test.
pub fn vmm() -> Command {
    Command::new(env!("CARGO_BIN_EXE_vmm"))
}

/// A bare-metal guest, or a failure that says how to build it.
pub fn guest(name: &str) -> PathBuf {
    let here = std::env::current_exe().expect("path of the test");
    let target = here.ancestors().nth(3).expect("target directory");
    let path = target.join("release").join(name);
    assert!(path.is_file(), "{}: build it with cargo build --release -p guests", path.display());
    path
}

/// Whether /dev/kvm opens; where not, the test says so and is skipped.
pub fn kvm_or_skip(test: &str) -> bool {
    match vmm::host::open_kvm() {
        Ok(_) => true,
        Err(e) => {
            println!("SKIPPED {test}: {e}");
            eprintln!("SKIPPED {test}: {e}");
            false
        }
    }
}

/// Runs a command to its end, at most `limit`; a failure shows the console's tail.
pub fn run(command: &mut Command, limit: Duration) -> Outcome {
    let started = Instant::now();
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = child.expect("the binary starts");
    let stdout = gather(child.stdout.take().expect("piped"));
    let stderr = gather(child.stderr.take().expect("piped"));
    let status = wait(&mut child, limit);
    let elapsed = started.elapsed();
    let (stdout, stderr) = (stdout.join().expect("utf-8"), stderr.join().expect("utf-8"));
    let Some(status) = status else {
        panic!("not over after {limit:?}\n{}\n{}", tail(&stdout), tail(&stderr));
    };
    Outcome { status, stdout, stderr, elapsed }
}

/// Reads a stream to its end, on a thread.
pub fn gather(mut stream: impl Read + Send + 'static) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = stream.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// Waits for the end; `None` (and a killed child) when the limit is reached.
pub fn wait(child: &mut Child, limit: Duration) -> Option<i32> {
    use std::os::unix::process::ExitStatusExt;
    let deadline = Instant::now() + limit;
    while Instant::now() < deadline {
        if let Some(status) = child.try_wait().expect("our child") {
            return Some(status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0)));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    let _ = child.kill();
    let _ = child.wait();
    None
}

/// The last lines of a console.
pub fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(25)..].join("\n")
}

/// The `@result` lines of a console.
pub fn results(console: &str) -> Vec<serde_json::Value> {
    console
        .lines()
        .filter_map(|line| line.split_once("@result "))
        .filter_map(|(_, json)| serde_json::from_str(json).ok())
        .collect()
}
