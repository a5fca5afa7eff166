//! Input on its way to the guest's serial port.
//!
//! From a pipe or a file it is read only while the guest has room for it, so a
//! flood waits there and not in our memory. What a person types is always read,
//! because the escape key must work in front of a guest that reads nothing. The
//! end of input is no end of the guest.

use crate::error::{Error, Result};
use crate::events::watch;
use crate::operator::Operator;
use crate::terminal;
use devices::serial::Serial;
use event_manager::{EventOps, EventSet, EventSubscriber, Events};
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex, PoisonError};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Bytes read at a time, and so the most that wait here from a pipe.
const CHUNK: usize = 4096;
/// Typed or pasted bytes that wait for the guest; what comes on top is dropped.
const MOST_TYPED: usize = 1 << 20;

/// Where input is on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    /// Wait for the loop to say that it is readable.
    Watched,
    /// Not watched: the guest has no room for what was read last.
    Held,
    /// Not watched: the terminal is somebody else's while we are in the background.
    Away,
    /// A file, which never blocks and cannot be watched (epoll(7): EPERM).
    File,
    /// No more comes.
    Ended,
}

struct State {
    reader: File,
    source: Source,
    pending: Vec<u8>,
    operator: Option<Operator>,
}

/// Moves bytes from a descriptor to the serial port.
pub struct Input {
    serial: Arc<Serial>,
    fd: RawFd,
    room: EventFd,
    state: Mutex<State>,
}

/// Told by the serial port when the guest has emptied its FIFO.
pub fn room_signal() -> Result<EventFd> {
    EventFd::new(EFD_NONBLOCK).map_err(|e| Error::new(format!("cannot make an eventfd ({e})")))
}

impl Input {
    /// `room` is what the serial port's own callback writes to, and whoever brings
    /// us back to the foreground. With an operator, `reader` is the terminal.
    pub fn new(
        reader: File,
        operator: Option<Operator>,
        serial: Arc<Serial>,
        room: EventFd,
    ) -> Self {
        let fd = reader.as_raw_fd();
        let state = State { reader, source: Source::Away, pending: Vec::new(), operator };
        Self { serial, fd, room, state: Mutex::new(state) }
    }

    /// Offers the guest what waits.
    fn offer(&self, state: &mut State) {
        if !state.pending.is_empty() {
            let taken = self.serial.enqueue(&state.pending);
            state.pending.drain(..taken);
        }
    }

    fn events(&self) -> Events {
        Events::new_raw(self.fd, EventSet::IN)
    }

    /// Moves what can be moved, and returns what is to be waited for.
    fn advance(&self, state: &mut State, readable: bool) -> Source {
        self.offer(state);
        match state.source {
            Source::Watched if readable => {
                if let Some(source) = state.fill() {
                    return source;
                }
                self.offer(state);
            }
            Source::File => {
                while state.pending.is_empty() {
                    if let Some(source) = state.fill() {
                        return source;
                    }
                    self.offer(state);
                }
                return Source::File;
            }
            Source::Away if state.away() => return Source::Away,
            Source::Ended => return Source::Ended,
            Source::Watched | Source::Held | Source::Away => {}
        }
        if state.operator.is_none() && !state.pending.is_empty() {
            Source::Held
        } else {
            Source::Watched
        }
    }
}

impl State {
    /// Whether we are in the background of the terminal that a person types on.
    fn away(&self) -> bool {
        self.operator.is_some() && !terminal::in_foreground()
    }

    /// Reads once; returns what the source is now if nothing came.
    fn fill(&mut self) -> Option<Source> {
        let mut chunk = [0; CHUNK];
        match self.reader.read(&mut chunk) {
            Ok(0) => Some(Source::Ended),
            Ok(n) => {
                match &mut self.operator {
                    Some(operator) => operator.typed(&chunk[..n], &mut self.pending),
                    None => self.pending.extend(&chunk[..n]),
                }
                self.pending.truncate(MOST_TYPED);
                None
            }
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                Some(self.source)
            }
            Err(_) if self.away() => Some(Source::Away),
            Err(_) => Some(Source::Ended),
        }
    }
}

impl EventSubscriber for Input {
    fn process(&self, events: Events, ops: &mut EventOps<'_>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let state = &mut *state;
        let readable = events.fd() == self.fd;
        if !readable {
            let _ = self.room.read();
        }
        let was_watched = state.source == Source::Watched;
        state.source = self.advance(state, readable);
        let watched = state.source == Source::Watched;
        if was_watched && !watched {
            let _ = ops.remove(self.events());
        } else if watched && !was_watched && !watch(ops, "input", self.events()) {
            state.source = Source::File;
            state.source = self.advance(state, false);
        }
    }

    fn init(&self, ops: &mut EventOps<'_>) {
        watch(ops, "the serial port's room", Events::new(&self.room, EventSet::IN));
        // The first of these events starts the flow.
        let _ = self.room.write(1);
    }
}
