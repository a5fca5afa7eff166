//! Where the guest's serial port leads: `--serial`.

use crate::error::{self, Error, Result};
use crate::output_file;
use crate::terminal;
use std::ffi::CStr;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::path::PathBuf;
use std::ptr;
use std::str::FromStr;
use std::time::{Duration, Instant};

/// What `--serial` says.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum SerialTo {
    /// Our standard input and output.
    #[default]
    Stdio,
    /// Nowhere; nothing comes.
    None,
    /// Output to a file, which is made anew.
    File(PathBuf),
    /// A new pseudo-terminal, whose name is told on stderr.
    Pty,
}

impl FromStr for SerialTo {
    type Err = &'static str;

    fn from_str(text: &str) -> std::result::Result<Self, Self::Err> {
        match text.split_once('=') {
            None if text == "stdio" => Ok(Self::Stdio),
            None if text == "none" => Ok(Self::None),
            None if text == "pty" => Ok(Self::Pty),
            Some(("file", path)) if !path.is_empty() => Ok(Self::File(path.into())),
            _ => Err("write stdio, none, file=PATH or pty"),
        }
    }
}

/// Where input comes from.
#[derive(Debug, Default)]
pub struct Source {
    /// What the guest is to receive, if anything can come.
    pub reader: Option<File>,
    /// Whether a person types there, whose escape key we serve.
    pub operator: bool,
    /// Both sides of a pseudo-terminal, which hangs up when nobody holds one of them.
    sides: Option<(File, OwnedFd)>,
}

impl Source {
    /// Waits a moment for the other side of a pseudo-terminal to be read: what is
    /// in it is lost when we close ours.
    pub fn drain(&self) {
        const PATIENCE: Duration = Duration::from_millis(500);
        let Some((_, other_side)) = &self.sides else { return };
        let deadline = Instant::now() + PATIENCE;
        loop {
            // Also what is still on its way through the kernel counts as unread.
            let mut unread =
                libc::pollfd { fd: other_side.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: one live structure, whose count is given.
            unsafe { libc::poll(&raw mut unread, 1, 0) };
            if unread.revents & libc::POLLIN == 0 || Instant::now() > deadline {
                return;
            }
            // Nothing tells when a pseudo-terminal has been read.
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Opens what `--serial` names.
///
/// # Errors
/// One line that names the flag.
pub fn open(to: &SerialTo) -> Result<(Output, Source)> {
    let failed = |what: String| move |e: io::Error| Error::new(format!("--serial {what}: {e}"));
    Ok(match to {
        SerialTo::None => (Output(None), Source::default()),
        SerialTo::File(path) => {
            let file =
                output_file::create(path).map_err(failed(format!("file={}", path.display())))?;
            (Output(Some(file)), Source::default())
        }
        SerialTo::Stdio => {
            // Copies, and no buffer in between: the loop must see each byte that
            // waits, and a slow reader must hold up nobody but the console thread.
            let copy = |fd: &dyn AsFd| fd.as_fd().try_clone_to_owned().map(File::from);
            let output = copy(&io::stdout()).map_err(failed("stdio".into()))?;
            let reader = copy(&io::stdin()).map_err(failed("stdio".into()))?;
            let operator = terminal::is_terminal();
            (Output(Some(output)), Source { reader: Some(reader), operator, sides: None })
        }
        SerialTo::Pty => {
            let (ours, theirs, name) = pseudo_terminal().map_err(failed("pty".into()))?;
            let copy = || ours.try_clone().map_err(failed("pty".into()));
            let (reader, held) = (copy()?, copy()?);
            error::tell(format_args!("vmm: the serial port is {name}\n"));
            let source =
                Source { reader: Some(reader), operator: false, sides: Some((held, theirs)) };
            (Output(Some(ours)), source)
        }
    })
}

/// A raw pseudo-terminal: our side, the other side, and the other side's name.
fn pseudo_terminal() -> io::Result<(File, OwnedFd, String)> {
    let (mut ours, mut theirs) = (-1, -1);
    let mut name = [0 as libc::c_char; 64];
    // SAFETY: openpty fills two descriptors and nothing else; on success both are
    // owned here. `termios` is plain data that tcgetattr fills before its use.
    // ptsname_r writes at most the length it is given, with its NUL.
    unsafe {
        if libc::openpty(&raw mut ours, &raw mut theirs, ptr::null_mut(), ptr::null(), ptr::null())
            != 0
        {
            return Err(io::Error::last_os_error());
        }
        let (ours, theirs) = (File::from_raw_fd(ours), OwnedFd::from_raw_fd(theirs));
        for fd in [ours.as_raw_fd(), theirs.as_raw_fd()] {
            libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC);
        }
        let mut modes: libc::termios = std::mem::zeroed();
        if libc::tcgetattr(theirs.as_raw_fd(), &raw mut modes) != 0 {
            return Err(io::Error::last_os_error());
        }
        libc::cfmakeraw(&raw mut modes);
        libc::tcsetattr(theirs.as_raw_fd(), libc::TCSANOW, &raw const modes);
        match libc::ptsname_r(ours.as_raw_fd(), name.as_mut_ptr(), name.len()) {
            0 => {
                let name = CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned();
                Ok((ours, theirs, name))
            }
            e => Err(io::Error::from_raw_os_error(e)),
        }
    }
}

/// Takes output, or lets it vanish.
#[derive(Debug)]
pub struct Output(Option<File>);

impl Write for Output {
    /// Waits where the descriptor does not: it may be shared with somebody who made
    /// it non-blocking.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let Some(file) = &mut self.0 else { return Ok(bytes.len()) };
        loop {
            match file.write(bytes) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    let mut wait =
                        libc::pollfd { fd: file.as_raw_fd(), events: libc::POLLOUT, revents: 0 };
                    // SAFETY: one live structure, whose count is given.
                    unsafe { libc::poll(&raw mut wait, 1, -1) };
                }
                done => return done,
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn serial_lines_have_names() {
        assert_eq!("stdio".parse(), Ok(SerialTo::Stdio));
        assert_eq!("file=a=b".parse(), Ok(SerialTo::File("a=b".into())));
        for bad in ["", "file=", "file", "tcp=1", "pty=x"] {
            assert!(bad.parse::<SerialTo>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_pseudo_terminal_carries_every_byte() {
        let (mut ours, theirs, _) = pseudo_terminal().unwrap();
        let all: Vec<u8> = (0..=255).collect();
        ours.write_all(&all).unwrap();
        let mut got = vec![0; 256];
        File::from(theirs).read_exact(&mut got).unwrap();
        assert_eq!(got, all);
    }
}
