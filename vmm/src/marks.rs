//! Moments of a run: ours on the way to the first guest instruction, then those
//! that the guest marks on its port.

use crate::stats::Reasons;
use serde::Serialize;
use std::sync::{Mutex, PoisonError};
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
