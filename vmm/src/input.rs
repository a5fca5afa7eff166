//! Standard input on its way to the guest's serial port.
//!
//! Input is read only while the guest has room for it, so a flood waits in its
//! pipe and not in our memory. The end of input is no end of the guest.

use crate::error::{Error, Result};
use crate::events::watch;
use devices::serial::Serial;
use event_manager::{EventOps, EventSet, EventSubscriber, Events};
use std::io::{ErrorKind, Read};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex, PoisonError};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Bytes read at a time, and so the most that wait here.
const CHUNK: usize = 4096;

/// Where input is on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    /// Wait for the loop to say that it is readable.
    Watched,
    /// Not watched: the guest has no room for what was read last.
    Held,
    /// A file, which never blocks and cannot be watched (epoll(7): EPERM).
    File,
    /// No more comes.
    Ended,
}

struct State<R> {
    reader: R,
    source: Source,
    pending: Vec<u8>,
}

/// Moves bytes from a reader to the serial port.
pub struct Input<R> {
    serial: Arc<Serial>,
    fd: RawFd,
    room: EventFd,
    state: Mutex<State<R>>,
}

/// Told by the serial port when the guest has emptied its FIFO.
pub fn room_signal() -> Result<EventFd> {
    EventFd::new(EFD_NONBLOCK).map_err(|e| Error::new(format!("cannot make an eventfd ({e})")))
}

impl<R: Read + AsRawFd> Input<R> {
    /// `room` is what the serial port's own callback writes to.
    pub fn new(reader: R, serial: Arc<Serial>, room: EventFd) -> Self {
        let fd = reader.as_raw_fd();
        let state = State { reader, source: Source::Watched, pending: Vec::new() };
        Self { serial, fd, room, state: Mutex::new(state) }
    }

    /// Offers what waits; returns whether the guest took all of it.
    fn offer(&self, state: &mut State<R>) -> bool {
        if !state.pending.is_empty() {
            let taken = self.serial.enqueue(&state.pending);
            state.pending.drain(..taken);
        }
        state.pending.is_empty()
    }

    /// Reads once; returns whether anything came.
    fn fill(&self, state: &mut State<R>) -> bool {
        state.pending.resize(CHUNK, 0);
        let read = state.reader.read(&mut state.pending);
        state.pending.truncate(*read.as_ref().unwrap_or(&0));
        match read {
            Ok(0) => state.source = Source::Ended,
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(_) => state.source = Source::Ended,
            Ok(_) => return true,
        }
        false
    }

    fn events(&self) -> Events {
        Events::new_raw(self.fd, EventSet::IN)
    }
}

impl<R: Read + AsRawFd + Send> EventSubscriber for Input<R> {
    fn process(&self, events: Events, ops: &mut EventOps<'_>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let state = &mut *state;
        if events.fd() == self.room.as_raw_fd() {
            let _ = self.room.read();
            if !self.offer(state) {
                return;
            }
        } else if self.fill(state) {
            self.offer(state);
        }
        while state.source == Source::File && state.pending.is_empty() {
            if !self.fill(state) || !self.offer(state) {
                break;
            }
        }
        let wanted = match (state.source, state.pending.is_empty()) {
            (Source::Watched | Source::Held, true) => Source::Watched,
            (Source::Watched | Source::Held, false) => Source::Held,
            (other, _) => other,
        };
        match (state.source, wanted) {
            (Source::Held, Source::Watched) => drop(watch(ops, "input", self.events())),
            (Source::Watched, Source::Held) => drop(ops.remove(self.events())),
            (Source::Ended, _) => drop(ops.remove(self.events())),
            _ => {}
        }
        state.source = wanted;
    }

    fn init(&self, ops: &mut EventOps<'_>) {
        watch(ops, "the serial port's room", Events::new(&self.room, EventSet::IN));
        if !watch(ops, "input", self.events()) {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            state.source = Source::File;
            // The room event starts the flow.
            let _ = self.room.write(1);
        }
    }
}
