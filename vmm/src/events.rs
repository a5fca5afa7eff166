//! The main thread's events: the machine's end, signals, the timeout, input.

use crate::ending::Ending;
use crate::error::{Error, Result};
use crate::lifecycle::Lifecycle;
use event_manager::{EventManager, EventOps, EventSet, EventSubscriber, Events, SubscriberOps};
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use vmm_sys_util::timerfd::TimerFd;

/// A subscriber of the loop.
pub type Subscriber = Arc<dyn EventSubscriber>;

/// Dispatches events until the machine has an ending.
///
/// # Errors
/// Only what the kernel refuses at the start.
pub fn run(lifecycle: &Lifecycle, subscribers: Vec<Subscriber>) -> Result<()> {
    let failed = |e: event_manager::Error| Error::new(format!("cannot wait for events ({e})"));
    let mut manager = EventManager::<Subscriber>::new().map_err(failed)?;
    for subscriber in subscribers {
        manager.add_subscriber(subscriber);
    }
    let ended = Arc::new(OnReadable { fd: lifecycle.ended.as_raw_fd() });
    manager.add_subscriber(ended);
    while lifecycle.ending().is_none() {
        match manager.run() {
            Ok(_) => {}
            Err(event_manager::Error::Epoll(e)) if e.errno() == libc::EINTR => {}
            Err(e) => return Err(failed(e)),
        }
    }
    Ok(())
}

/// Wakes the loop and nothing else.
struct OnReadable {
    fd: i32,
}

impl EventSubscriber for OnReadable {
    fn process(&self, _: Events, _: &mut EventOps<'_>) {}

    fn init(&self, ops: &mut EventOps<'_>) {
        watch(ops, "the end of the machine", Events::new_raw(self.fd, EventSet::IN));
    }
}

/// Adds a descriptor to the loop; a refusal is told, for nothing else can be done.
pub fn watch(ops: &mut EventOps<'_>, what: &str, events: Events) -> bool {
    match ops.add(events) {
        Ok(()) => true,
        Err(e) => {
            log::debug!("cannot watch {what}: {e}");
            false
        }
    }
}

/// Signals that end the machine in order.
const ENDING_SIGNALS: [libc::c_int; 3] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP];

/// The signals that end the machine, as a descriptor.
pub struct Signals {
    fd: Mutex<File>,
    lifecycle: Arc<Lifecycle>,
}

impl Signals {
    /// Blocks the signals in the calling thread; threads made later inherit that,
    /// so this comes before any of them.
    pub fn block() -> Result<File> {
        // SAFETY: `sigset_t` is plain data and initialised by sigemptyset before
        // use; the calls touch nothing else; signalfd returns an owned descriptor
        // or -1, which is checked before it is wrapped.
        unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut set);
            for signal in ENDING_SIGNALS {
                libc::sigaddset(&raw mut set, signal);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
            let fd = libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
            if fd < 0 {
                let e = std::io::Error::last_os_error();
                return Err(Error::new(format!("cannot wait for signals ({e})")));
            }
            Ok(File::from_raw_fd(fd))
        }
    }

    /// Ends `lifecycle` when one of them comes.
    pub fn new(fd: File, lifecycle: Arc<Lifecycle>) -> Self {
        Self { fd: Mutex::new(fd), lifecycle }
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
            let number = i32::from_ne_bytes([info[0], info[1], info[2], info[3]]);
            self.lifecycle.end(Ending::Signal(number));
        }
    }

    fn init(&self, ops: &mut EventOps<'_>) {
        let fd = self.fd.lock().unwrap_or_else(PoisonError::into_inner).as_raw_fd();
        watch(ops, "signals", Events::new_raw(fd, EventSet::IN));
    }
}

/// Ends the machine when its time is over.
pub struct Timeout {
    timer: TimerFd,
    lifecycle: Arc<Lifecycle>,
}

impl Timeout {
    /// Starts to count now.
    pub fn start(after: Duration, lifecycle: Arc<Lifecycle>) -> Result<Self> {
        let failed = |e| Error::new(format!("--timeout: cannot set a timer ({e})"));
        let mut timer = TimerFd::new().map_err(failed)?;
        timer.reset(after, None).map_err(failed)?;
        Ok(Self { timer, lifecycle })
    }
}

impl EventSubscriber for Timeout {
    fn process(&self, _: Events, _: &mut EventOps<'_>) {
        self.lifecycle.end(Ending::Timeout);
    }

    fn init(&self, ops: &mut EventOps<'_>) {
        watch(ops, "the timeout", Events::new(&self.timer, EventSet::IN));
    }
}
