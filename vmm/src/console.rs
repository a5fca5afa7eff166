//! Guest output on its way to stdout: a bounded ring and a thread that writes.
//!
//! A vCPU puts a byte in the ring and goes on; when stdout blocks and the ring
//! is full, bytes are dropped and counted, and the guest's clock runs on.

use crate::error::{Error, Result};
use crate::seccomp;
use crate::signals;
use std::collections::VecDeque;
use std::fmt;
use std::io::{self, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Bytes that wait for a slow reader before output is dropped.
const CAPACITY: usize = 1 << 20;

/// How long the end of the process waits for stdout to take the rest.
const DRAIN: Duration = Duration::from_millis(500);

/// Output that nobody got.
#[derive(Debug, Default)]
pub struct Lost {
    /// How much.
    pub bytes: u64,
    /// What the output said at last, if it was not just slow.
    error: Option<io::Error>,
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes of console output were dropped: ", self.bytes)?;
        match &self.error {
            Some(e) => write!(f, "{e}"),
            None => write!(f, "they were not read"),
        }
    }
}

#[derive(Debug, Default)]
struct Ring {
    bytes: VecDeque<u8>,
    lost: Lost,
    writing: bool,
    closed: bool,
}

#[derive(Debug, Default)]
struct Shared {
    ring: Mutex<Ring>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The consumer's side.
#[derive(Debug)]
pub struct Console {
    shared: Arc<Shared>,
}

impl Console {
    /// Starts the thread that copies the ring to `output`.
    pub fn start(mut output: impl Write + Send + 'static) -> Result<Self> {
        let shared = Arc::new(Shared::default());
        let ring = shared.clone();
        thread::Builder::new()
            .name("console".into())
            .spawn(move || {
                signals::leave_to_main();
                seccomp::enter(seccomp::Thread::Console);
                copy(&ring, &mut output);
            })
            .map_err(|e| Error::new(format!("cannot start the console thread ({e})")))?;
        Ok(Self { shared })
    }

    /// A writer for a device; it never blocks on the output.
    pub fn writer(&self) -> Writer {
        Writer { shared: self.shared.clone() }
    }

    /// Waits a moment for the output to take what is left, and tells what it did not.
    pub fn finish(self) -> Lost {
        let deadline = Instant::now() + DRAIN;
        let mut ring = self.shared.lock();
        ring.closed = true;
        self.shared.changed.notify_all();
        while ring.writing || !ring.bytes.is_empty() {
            let Some(left) = deadline.checked_duration_since(Instant::now()) else {
                // The thread is stuck in write(2); the process ends without it.
                ring.lost.bytes += ring.bytes.len() as u64;
                break;
            };
            ring = self
                .shared
                .changed
                .wait_timeout(ring, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        // A thread with nothing left to do ends by itself.
        std::mem::take(&mut ring.lost)
    }
}

fn copy(shared: &Shared, output: &mut impl Write) {
    let mut chunk = Vec::with_capacity(4096);
    loop {
        let mut ring = shared.lock();
        while ring.bytes.is_empty() {
            if ring.closed {
                return;
            }
            ring = shared.changed.wait(ring).unwrap_or_else(PoisonError::into_inner);
        }
        let take = ring.bytes.len().min(4096);
        chunk.clear();
        chunk.extend(ring.bytes.drain(..take));
        ring.writing = true;
        drop(ring);
        let written = output.write_all(&chunk).and_then(|()| output.flush());
        let mut ring = shared.lock();
        ring.writing = false;
        if let Err(e) = written {
            // A closed pipe or a full disk: the guest goes on.
            ring.lost.bytes += chunk.len() as u64;
            ring.lost.error = Some(e);
        }
        shared.changed.notify_all();
    }
}

/// The device's side of the ring.
#[derive(Debug, Clone)]
pub struct Writer {
    shared: Arc<Shared>,
}

impl Write for Writer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut ring = self.shared.lock();
        let room = CAPACITY.saturating_sub(ring.bytes.len()).min(bytes.len());
        let was_empty = ring.bytes.is_empty();
        ring.bytes.extend(&bytes[..room]);
        ring.lost.bytes += (bytes.len() - room) as u64;
        drop(ring);
        if was_empty {
            self.shared.changed.notify_all();
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn everything_arrives_in_order() {
        let got = Arc::new(Mutex::new(Vec::new()));
        let console = Console::start(Sink(got.clone())).unwrap();
        let mut writer = console.writer();
        let sent: Vec<u8> = (0..100_000u32).map(|i| i as u8).collect();
        sent.chunks(7).for_each(|c| writer.write_all(c).unwrap());
        assert_eq!(console.finish().bytes, 0);
        assert_eq!(*got.lock().unwrap(), sent);
    }

    /// Blocks in its first write until the sender is dropped.
    struct Stuck(mpsc::Receiver<()>);

    impl Write for Stuck {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let _ = self.0.recv();
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_blocked_output_blocks_nobody_and_memory_stays_bounded() {
        let (hold, held) = mpsc::channel();
        let console = Console::start(Stuck(held)).unwrap();
        let mut writer = console.writer();
        for _ in 0..5 {
            writer.write_all(&vec![0; CAPACITY]).unwrap();
        }
        assert!(console.shared.lock().bytes.len() <= CAPACITY);
        let lost = console.finish().bytes;
        assert!(lost >= 4 * CAPACITY as u64 - 4096, "{lost}");
        drop(hold);
    }

    struct Closed;

    impl Write for Closed {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::BrokenPipe.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_closed_pipe_is_no_end() {
        let console = Console::start(Closed).unwrap();
        let mut writer = console.writer();
        writer.write_all(b"lost").unwrap();
        let lost = console.finish();
        assert_eq!(lost.bytes, 4);
        assert!(lost.to_string().contains("broken pipe"), "{lost}");
    }
}
