//! Moments of a run: ours on the way to the first guest instruction, then those
//! that the guest marks on its port.

use crate::stats::Reasons;
use serde::Serialize;
use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// Marks kept; a guest that marks without end loses the later ones.
const MOST: usize = 1024;

/// One moment.
#[derive(Debug, Clone, Serialize)]
pub struct Mark {
    /// What happened; `guest N` for byte N on the mark port.
    pub name: String,
    /// Time since the process began to work, in ns of CLOCK_MONOTONIC.
    pub ns: u64,
    /// Exits of all vCPUs so far, by reason; for the guest's marks alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exits: Option<Reasons>,
}

/// All moments so far.
#[derive(Debug)]
pub struct Marks {
    start: Instant,
    marks: Mutex<Vec<Mark>>,
}

impl Marks {
    /// Time 0 is now.
    pub fn start() -> Self {
        Self { start: Instant::now(), marks: Mutex::default() }
    }

    /// Notes a moment.
    pub fn note(&self, name: impl Into<String>, exits: Option<Reasons>) {
        let ns = u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let mut marks = self.marks.lock().unwrap_or_else(PoisonError::into_inner);
        if marks.len() < MOST {
            marks.push(Mark { name: name.into(), ns, exits });
        }
    }

    /// The moments so far, in order.
    pub fn list(&self) -> Vec<Mark> {
        self.marks.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Notes the guest's first byte of output as a moment.
pub struct FirstByte<W> {
    writer: W,
    marks: Option<Arc<Marks>>,
}

impl<W: Write> FirstByte<W> {
    /// What is written goes to `writer`.
    pub fn new(writer: W, marks: Arc<Marks>) -> Self {
        Self { writer, marks: Some(marks) }
    }
}

impl<W: Write> Write for FirstByte<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Some(marks) = self.marks.take() {
            marks.note("first console byte", None);
        }
        self.writer.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.writer.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_first_byte_is_a_moment() {
        let marks = Arc::new(Marks::start());
        let mut writer = FirstByte::new(Vec::new(), marks.clone());
        writer.write_all(b"a").unwrap();
        writer.write_all(b"b").unwrap();
        assert_eq!(writer.writer, b"ab");
        let list = marks.list();
        assert_eq!(list.len(), 1);
        assert_eq!(list[0].name, "first console byte");
    }
}
