//! Moments of a run: ours on the way to the first guest instruction, then those
//! that the guest marks on its port.
//!
//! | mark | the moment |
//! |---|---|
//! | (time 0) | `main` begins; what the loader did before is not in it |
//! | `kvm ready` | VM, interrupt controllers and MSR filter are there |
//! | `memory` | guest memory is mapped and known to KVM |
//! | `kernel loaded` | kernel, initrd, command line and tables are in it |
//! | `vcpus ready` | the last vCPU is created and set up |
//! | `vcpu 0 enters` | right before its first KVM_RUN: the nearest that we can see to the first guest instruction |
//! | `last vcpu enters` | the same of the last thread; APs wait for SIPI inside KVM_RUN |
//! | `first console byte` | of a guest that says so early, the kernel's entry |
//! | `guest …` | a byte on the mark port: see [`devices::marks`] |

use crate::stats::Reasons;
use crate::tsc;
use serde::Serialize;
use std::fmt::Write as _;
use std::io::{self, Write};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// Marks kept; a guest that marks without end loses the later ones.
const MOST: usize = 1024;

/// One moment.
#[derive(Debug, Clone, Serialize)]
pub struct Mark {
    /// What happened, as in the table above.
    pub name: String,
    /// Time since the process began to work, in ns of CLOCK_MONOTONIC.
    pub ns: u64,
    /// The same moment in ns of CLOCK_MONOTONIC_RAW, which nobody steers.
    pub raw_ns: u64,
    /// Exits of all vCPUs so far, by reason; for the guest's marks alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exits: Option<Reasons>,
}

/// All moments so far.
#[derive(Debug)]
pub struct Marks {
    start: Instant,
    marks: Mutex<Vec<Mark>>,
    entered: AtomicUsize,
}

impl Marks {
    /// Time 0 is now.
    pub fn start() -> Self {
        Self { start: Instant::now(), marks: Mutex::default(), entered: AtomicUsize::new(0) }
    }

    /// Notes a moment.
    pub fn note(&self, name: impl Into<String>, exits: Option<Reasons>) {
        let raw_ns = tsc::monotonic_raw_ns();
        let ns = u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let mut marks = self.marks.lock().unwrap_or_else(PoisonError::into_inner);
        if marks.len() < MOST {
            marks.push(Mark { name: name.into(), ns, raw_ns, exits });
        }
    }

    /// vCPU `index` of `cpus` is about to call KVM_RUN for the first time.
    pub fn vcpu_enters(&self, index: u32, cpus: usize) {
        if index == 0 {
            self.note("vcpu 0 enters", None);
        }
        if self.entered.fetch_add(1, Ordering::Relaxed) + 1 == cpus {
            self.note("last vcpu enters", None);
        }
    }

    /// The moments so far, in order.
    pub fn list(&self) -> Vec<Mark> {
        self.marks.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The moments so far for people: ms since time 0 and since the mark before.
    pub fn table(&self) -> String {
        let mut text =
            String::from("vmm: boot timer, ms since main() began (and since the line above)\n");
        let mut before = 0;
        for mark in self.list() {
            let ms = |ns: u64| ns as f64 / 1e6;
            let since = ms(mark.ns.saturating_sub(before));
            let _ = writeln!(text, "vmm: {:10.3} {since:+10.3}  {}", ms(mark.ns), mark.name);
            before = mark.ns;
        }
        text
    }
}

/// Marks the first byte that is written through it.
pub struct FirstByte<W> {
    inner: W,
    marks: Option<Arc<Marks>>,
}

impl<W> FirstByte<W> {
    /// In front of `inner`.
    pub fn new(inner: W, marks: Arc<Marks>) -> Self {
        Self { inner, marks: Some(marks) }
    }
}

impl<W: Write> Write for FirstByte<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Some(marks) = self.marks.take() {
            marks.note("first console byte", None);
        }
        self.inner.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_moment_is_told_once_and_in_order() {
        let marks = Arc::new(Marks::start());
        marks.note("kvm ready", None);
        for index in [1, 0] {
            marks.vcpu_enters(index, 2);
        }
        let mut console = FirstByte::new(Vec::new(), marks.clone());
        console.write_all(b"a").unwrap();
        console.write_all(b"b").unwrap();
        assert_eq!(console.inner, b"ab");
        let list = marks.list();
        let names: Vec<_> = list.iter().map(|mark| mark.name.as_str()).collect();
        assert_eq!(names, ["kvm ready", "vcpu 0 enters", "last vcpu enters", "first console byte"]);
        assert!(list.is_sorted_by_key(|mark| mark.ns));
        assert_eq!(marks.table().lines().count(), 1 + names.len());
    }

    #[test]
    fn a_guest_that_marks_without_end_costs_no_memory() {
        let marks = Marks::start();
        (0..10 * MOST).for_each(|_| marks.note("guest 0", None));
        assert_eq!(marks.list().len(), MOST);
    }
}
