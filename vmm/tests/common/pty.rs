//! A terminal for the binary under test, and somebody who types on it.
#![allow(dead_code)] // each test file uses a part

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

/// What the screen shows so far.
type Screen = Arc<(Mutex<Vec<u8>>, Condvar)>;

pub struct Pty {
    keyboard: File,
    terminal: OwnedFd,
    screen: Screen,
}

impl Pty {
    pub fn new() -> Self {
        let (mut ours, mut theirs) = (-1, -1);
        let null = std::ptr::null_mut();
        // SAFETY: openpty fills both descriptors, which are owned from then on.
        let (keyboard, terminal) = unsafe {
            let opened = libc::openpty(
                &raw mut ours,
                &raw mut theirs,
                null,
                std::ptr::null(),
                std::ptr::null(),
            );
            assert_eq!(opened, 0, "{}", std::io::Error::last_os_error());
            for fd in [ours, theirs] {
                libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC);
            }
            (File::from_raw_fd(ours), OwnedFd::from_raw_fd(theirs))
        };
        let screen = Screen::default();
        let (mut reader, shown) = (keyboard.try_clone().expect("a descriptor"), screen.clone());
        std::thread::spawn(move || {
            let mut chunk = [0; 4096];
            while let Ok(n) = reader.read(&mut chunk) {
                shown.0.lock().expect("screen").extend(&chunk[..n]);
                shown.1.notify_all();
            }
        });
        Self { keyboard, terminal, screen }
    }

    /// Starts a program that leads the terminal's session, in the foreground.
    pub fn spawn(&self, command: &mut Command) -> Child {
        self.attach(command);
        // SAFETY: both calls are safe between fork and exec.
        unsafe {
            command.pre_exec(|| {
                libc::setsid();
                match libc::ioctl(0, libc::TIOCSCTTY, 0) {
                    0 => Ok(()),
                    _ => Err(std::io::Error::last_os_error()),
                }
            });
        }
        command.spawn().expect("the binary starts")
    }

    /// Gives the program this terminal and nothing more.
    fn attach(&self, command: &mut Command) {
        let end = || Stdio::from(self.terminal.try_clone().expect("a descriptor"));
        command.stdin(end()).stdout(end()).stderr(end());
    }

    pub fn type_in(&self, bytes: &[u8]) {
        (&self.keyboard).write_all(bytes).expect("the terminal takes input");
    }

    /// Waits until the screen shows `text` after `from` bytes, and returns where it ends.
    pub fn expect(&self, from: usize, text: &str) -> usize {
        let deadline = Instant::now() + Duration::from_secs(20);
        let mut screen = self.screen.0.lock().expect("screen");
        loop {
            let found = screen[from.min(screen.len())..]
                .windows(text.len())
                .position(|window| window == text.as_bytes());
            if let Some(at) = found {
                return from + at + text.len();
            }
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "no {text:?} in {:?}", String::from_utf8_lossy(&screen));
            screen = self.screen.1.wait_timeout(screen, left).expect("screen").0;
        }
    }

    /// All that the screen shows.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.screen.0.lock().expect("screen")).into_owned()
    }

    /// The terminal's modes: input, output, control, local.
    pub fn modes(&self) -> [u32; 4] {
        // SAFETY: `termios` is plain data, filled by tcgetattr.
        let modes = unsafe {
            let mut modes: libc::termios = std::mem::zeroed();
            assert_eq!(libc::tcgetattr(self.terminal.as_raw_fd(), &raw mut modes), 0);
            modes
        };
        [modes.c_iflag, modes.c_oflag, modes.c_cflag, modes.c_lflag]
    }

    pub fn is_raw(&self) -> bool {
        self.modes()[3] & libc::ICANON == 0
    }
}
