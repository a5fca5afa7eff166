//! The terminal on standard input: raw while the guest owns it, and given back on
//! every way out.
//!
//! What there is to give back is kept in statics, because panics and signal
//! handlers give it back too.

use std::mem::MaybeUninit;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

const STDIN: libc::c_int = libc::STDIN_FILENO;

/// How the terminal was before we first touched it.
static BEFORE: OnceLock<libc::termios> = OnceLock::new();
/// Whether the guest's console is on it.
static WANTED: AtomicBool = AtomicBool::new(false);
/// Whether it is raw because of us.
static RAW: AtomicBool = AtomicBool::new(false);

/// Whether standard input is a terminal.
pub fn is_terminal() -> bool {
    // SAFETY: no precondition; any descriptor number may be asked about.
    unsafe { libc::isatty(STDIN) == 1 }
}

/// Whether this process may read and set the terminal: it is in the foreground,
/// or the terminal is not the one that controls its session, where no job control
/// applies.
pub fn in_foreground() -> bool {
    // SAFETY: neither call has a precondition.
    let (owner, ours) = unsafe { (libc::tcgetpgrp(STDIN), libc::getpgrp()) };
    owner == ours
        || owner == -1 && std::io::Error::last_os_error().raw_os_error() == Some(libc::ENOTTY)
}

/// Makes the terminal raw, if the guest's console is on one and we are in the
/// foreground: at the start, and whenever we are continued, for the shell changes
/// its modes while we are stopped. Output processing stays on: our own lines end
/// in a bare line feed.
pub fn take() {
    if !WANTED.load(Ordering::SeqCst) || !is_terminal() || !in_foreground() {
        return;
    }
    let mut now = MaybeUninit::<libc::termios>::uninit();
    // SAFETY: tcgetattr fills the structure when it returns 0, and only then is it
    // taken for initialised; the others read what they are given.
    unsafe {
        if libc::tcgetattr(STDIN, now.as_mut_ptr()) != 0 {
            return;
        }
        let now = now.assume_init();
        let mut raw = *BEFORE.get_or_init(|| now);
        libc::cfmakeraw(&raw mut raw);
        raw.c_oflag = now.c_oflag;
        // Before the call: a signal between the two must find something to undo.
        RAW.store(true, Ordering::SeqCst);
        libc::tcsetattr(STDIN, libc::TCSANOW, &raw const raw);
    }
}

/// Gives the terminal back as it was. May be called at any time, from a signal
/// handler too. In the background the terminal is somebody else's by now, and the
/// shell has put it in order.
pub fn restore() {
    if RAW.swap(false, Ordering::SeqCst)
        && in_foreground()
        && let Some(before) = BEFORE.get()
    {
        // SAFETY: a live structure that tcgetattr filled.
        unsafe { libc::tcsetattr(STDIN, libc::TCSANOW, before) };
    }
}

/// The guest's hold on the terminal: from here to its drop.
#[derive(Debug)]
pub struct Taken(());

impl Taken {
    /// Takes the terminal.
    pub fn now() -> Self {
        // Background accesses fail instead of stopping the process: a machine goes
        // on when its console is taken away.
        // SAFETY: ignoring a signal installs no code.
        unsafe {
            libc::signal(libc::SIGTTIN, libc::SIG_IGN);
            libc::signal(libc::SIGTTOU, libc::SIG_IGN);
        }
        WANTED.store(true, Ordering::SeqCst);
        take();
        Self(())
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        WANTED.store(false, Ordering::SeqCst);
        restore();
    }
}
