//! `--control SOCKET`: one JSON command a line, one JSON answer a line.
//!
//! `{"command":"status"}` is answered `{"ok":{…}}`, what cannot be done
//! `{"error":"one line"}`. Whoever may connect may end the machine, so the socket is
//! its owner's alone. Memory is bounded: so many connections, so long a line, and
//! no command is read while an answer waits to be taken.

use crate::control::{Command, Control};
use crate::error::{Error, Result};
use crate::events::watch;
use event_manager::{EventOps, EventSet, EventSubscriber, Events};
use serde_json::json;
use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Connections at a time.
const MOST_CONNECTIONS: usize = 8;
/// Bytes of one line, and bytes read at a time.
const LONGEST_LINE: usize = 4096;
/// The token of the listening socket; connections have their place's number.
const LISTENER: u32 = MOST_CONNECTIONS as u32;

/// A bound socket that nobody serves yet; its file goes with it.
#[derive(Debug)]
pub struct Socket {
    listener: UnixListener,
    path: PathBuf,
}

impl Socket {
    /// Binds it. A socket of that name that nobody listens on is taken over.
    ///
    /// # Errors
    /// One line that names the flag.
    pub fn bind(path: &Path) -> Result<Self> {
        let failed = |e| Error::new(format!("--control {}: {e}", path.display()));
        if let Ok(there) = fs::symlink_metadata(path) {
            let why = match there.file_type().is_socket() {
                false => "is there already and no socket; remove it or name another path",
                true if UnixStream::connect(path).is_ok() => {
                    "another machine listens there; name another path"
                }
                true => "",
            };
            if !why.is_empty() {
                return Err(Error::new(format!("--control {}: {why}", path.display())));
            }
            fs::remove_file(path).map_err(failed)?;
        }
        // SAFETY: umask has no memory effects. Between the two calls this thread makes
        // nothing but the socket, which nobody else may open even for a moment.
        let mask = unsafe { libc::umask(0o177) };
        let bound = UnixListener::bind(path);
        // SAFETY: as above.
        unsafe { libc::umask(mask) };
        let listener = bound.map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        Ok(Self { listener, path: path.to_owned() })
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Serves a socket from the main loop.
pub struct Server {
    socket: Socket,
    control: Control,
    connections: Mutex<[Option<Connection>; MOST_CONNECTIONS]>,
}

struct Connection {
    stream: UnixStream,
    input: Vec<u8>,
    output: Vec<u8>,
}

/// What a connection waits for.
#[derive(Debug, PartialEq, Eq)]
enum Wait {
    /// A command.
    Input,
    /// Room for an answer.
    Output,
    /// Nothing: it is over.
    Over,
}

impl Server {
    /// Lets `socket` act through `control`.
    pub fn new(socket: Socket, control: Control) -> Self {
        Self { socket, control, connections: Mutex::default() }
    }

    fn accept(&self, ops: &mut EventOps<'_>) {
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        // An error is a client's that has gone again; the next one raises the next event.
        let Ok((mut stream, _)) = self.socket.listener.accept() else { return };
        if stream.set_nonblocking(true).is_err() {
            return;
        }
        let Some(place) = connections.iter().position(Option::is_none) else {
            let _ = stream.write(b"{\"error\":\"too many connections: close one\"}\n");
            return;
        };
        let connection = Connection { stream, input: Vec::new(), output: Vec::new() };
        if watch(ops, "a control connection", connection.events(place as u32, EventSet::IN)) {
            connections[place] = Some(connection);
        }
    }

    fn serve(&self, token: u32, ops: &mut EventOps<'_>) {
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(place) = connections.get_mut(token as usize) else { return };
        let Some(connection) = place else { return };
        let wanted = match connection.go_on(&self.control) {
            Wait::Input => EventSet::IN,
            Wait::Output => EventSet::OUT,
            Wait::Over => {
                let _ = ops.remove(connection.events(token, EventSet::empty()));
                *place = None;
                return;
            }
        };
        let _ = ops.modify(connection.events(token, wanted));
    }
}

impl EventSubscriber for Server {
    fn process(&self, events: Events, ops: &mut EventOps<'_>) {
        match events.data() {
            LISTENER => self.accept(ops),
            place => self.serve(place, ops),
        }
    }

    fn init(&self, ops: &mut EventOps<'_>) {
        let events =
            Events::with_data_raw(self.socket.listener.as_raw_fd(), LISTENER, EventSet::IN);
        watch(ops, "the control socket", events);
    }
}

impl Connection {
    fn events(&self, token: u32, set: EventSet) -> Events {
        Events::with_data_raw(self.stream.as_raw_fd(), token, set)
    }

    /// Does as much as can be done without waiting, up to one buffer of commands.
    fn go_on(&mut self, control: &Control) -> Wait {
        if !self.output.is_empty() {
            return self.flush();
        }
        let mut buffer = [0; LONGEST_LINE];
        match self.stream.read(&mut buffer) {
            Ok(0) => return Wait::Over,
            Ok(n) => self.input.extend_from_slice(&buffer[..n]),
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(_) => return Wait::Over,
        }
        while let Some(end) = self.input.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.input.drain(..=end).collect();
            let answer = answer(&line, |command| control.execute(command));
            self.output.extend_from_slice(answer.as_bytes());
        }
        if self.input.len() > LONGEST_LINE {
            let _ = self.stream.write(b"{\"error\":\"a line is at most 4096 bytes\"}\n");
            return Wait::Over;
        }
        self.flush()
    }

    fn flush(&mut self) -> Wait {
        while !self.output.is_empty() {
            match self.stream.write(&self.output) {
                Ok(n) => drop(self.output.drain(..n)),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Wait::Output,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Wait::Over,
            }
        }
        Wait::Input
    }
}

/// One line in, one line out.
fn answer(
    line: &[u8],
    execute: impl FnOnce(Command) -> std::result::Result<serde_json::Value, String>,
) -> String {
    let command = serde_json::from_slice(line).map_err(|e| format!("not a command: {e}"));
    let answer = match command.and_then(execute) {
        Ok(value) => json!({ "ok": value }),
        Err(line) => json!({ "error": line }),
    };
    format!("{answer}\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn answers_are_one_line_whatever_comes() {
        let ok = answer(b"{\"command\":\"status\"}\n", |c| Ok(json!({"got": format!("{c:?}")})));
        assert_eq!(ok, "{\"ok\":{\"got\":\"Status\"}}\n");
        for wrong in [&b"\xff\xfe\n"[..], b"\n", b"[[[[[[\n", b"{\"command\":\"x\\ny\"}\n"] {
            let answer = answer(wrong, |_| Ok(json!(null)));
            assert!(answer.starts_with("{\"error\":\"not a command"), "{answer}");
            assert_eq!(answer.matches('\n').count(), 1);
        }
    }

    #[test]
    fn a_stale_socket_is_taken_over_and_anything_else_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control");
        drop(UnixListener::bind(&path).unwrap());
        let socket = Socket::bind(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let error = Socket::bind(&path).unwrap_err().to_string();
        assert!(error.contains("another machine"), "{error}");
        drop(socket);
        assert!(!path.exists());
        fs::write(&path, "precious").unwrap();
        let error = Socket::bind(&path).unwrap_err().to_string();
        assert!(error.contains("--control") && error.contains("no socket"), "{error}");
        assert_eq!(fs::read(&path).unwrap(), b"precious");
    }
}
