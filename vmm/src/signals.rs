//! Signals from outside: those that end the machine in order, and job control.
//!
//! Until the machine runs there is nothing to put in order, and a handler ends the
//! process at once. From then on they are a descriptor of the main loop's; all
//! other threads block them.

use crate::ending::Ending;
use crate::error::{Error, Result};
use crate::events::watch;
use crate::lifecycle::State;
use crate::machine::Shared;
use crate::terminal;
use event_manager::{EventOps, EventSet, EventSubscriber, Events};
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use vmm_sys_util::eventfd::EventFd;

/// Signals that end the machine in order.
const ENDING: [libc::c_int; 4] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT];
/// Job control, which a terminal in raw mode must follow.
const JOB_CONTROL: [libc::c_int; 2] = [libc::SIGTSTP, libc::SIGCONT];

extern "C" fn exit_now(number: libc::c_int) {
    terminal::restore();
    // SAFETY: _exit is what a signal handler may call.
    unsafe { libc::_exit(Ending::Signal(number).code()) };
}

/// From here to [`Signals::block`], an ending signal exits at once with its code.
/// A SIGHUP that is ignored, as under nohup, stays so. A file that grows beyond the
/// limit on sizes is an error of that write and ends nothing (SIGXFSZ).
pub fn exit_at_once() {
    // SAFETY: `sigaction` is plain data, zeroed to the empty mask and no flags; the
    // handler calls only what a handler may. Ignoring a signal installs no code.
    unsafe {
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
        for signal in ENDING {
            let mut before: libc::sigaction = std::mem::zeroed();
            libc::sigaction(signal, ptr::null(), &raw mut before);
            if signal == libc::SIGHUP && before.sa_sigaction == libc::SIG_IGN {
                continue;
            }
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = exit_now as extern "C" fn(libc::c_int) as libc::sighandler_t;
            libc::sigaction(signal, &raw const action, ptr::null_mut());
        }
    }
}

fn block_ours() -> libc::sigset_t {
    // SAFETY: `sigset_t` is plain data and initialised by sigemptyset before use;
    // the calls touch nothing else.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in ENDING.into_iter().chain(JOB_CONTROL) {
            libc::sigaddset(&raw mut set, signal);
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, ptr::null_mut());
        set
    }
}

/// First call of every thread but the main one.
pub fn leave_to_main() {
    block_ours();
}

/// The signals, as a subscriber of the main loop.
pub struct Signals {
    fd: Mutex<File>,
    shared: Arc<Shared>,
    /// Whether the machine is to go on when this process does.
    stopped: AtomicBool,
    /// Rung when the terminal may have become ours.
    input: EventFd,
}

impl Signals {
    /// Blocks them in the calling thread, and delivers them here from now on.
    ///
    /// # Errors
    /// A process without room for one more descriptor.
    pub fn block(shared: Arc<Shared>, input: EventFd) -> Result<Self> {
        let set = block_ours();
        // SAFETY: signalfd reads the set and returns an owned descriptor or -1,
        // which is checked before it is wrapped.
        let fd = unsafe {
            let fd = libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
            if fd < 0 {
                let e = std::io::Error::last_os_error();
                return Err(Error::new(format!("cannot wait for signals ({e})")));
            }
            File::from_raw_fd(fd)
        };
        Ok(Self { fd: Mutex::new(fd), shared, stopped: AtomicBool::new(false), input })
    }

    fn act(&self, number: libc::c_int) {
        match number {
            libc::SIGTSTP => {
                if self.shared.lifecycle.state() == State::Running {
                    self.stopped.store(true, Ordering::Relaxed);
                    self.shared.pause();
                }
                terminal::restore();
                // SAFETY: stops this process until somebody continues it.
                unsafe { libc::kill(libc::getpid(), libc::SIGSTOP) };
            }
            libc::SIGCONT => {
                // Not sooner: after kill, the stop may still be on its way to us.
                if self.stopped.swap(false, Ordering::Relaxed) {
                    self.shared.resume();
                }
                terminal::take();
                let _ = self.input.write(1);
            }
            _ => self.shared.lifecycle.end(Ending::Signal(number)),
        }
    }
}

impl EventSubscriber for Signals {
    fn process(&self, _: Events, _: &mut EventOps<'_>) {
        let mut info = [0u8; size_of::<libc::signalfd_siginfo>()];
        let mut fd = self.fd.lock().unwrap_or_else(PoisonError::into_inner);
        while let Ok(n) = fd.read(&mut info) {
            if n < 4 {
                return;
            }
            // ssi_signo is the structure's first word (signalfd(2)).
            self.act(i32::from_ne_bytes([info[0], info[1], info[2], info[3]]));
        }
    }

    fn init(&self, ops: &mut EventOps<'_>) {
        let fd = self.fd.lock().unwrap_or_else(PoisonError::into_inner).as_raw_fd();
        watch(ops, "signals", Events::new_raw(fd, EventSet::IN));
    }
}
