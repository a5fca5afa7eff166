//! The main thread's events: the machine's end, and the timeout.

use crate::ending::Ending;
use crate::error::{Error, Result};
use crate::lifecycle::Lifecycle;
use event_manager::{EventManager, EventOps, EventSet, EventSubscriber, Events, SubscriberOps};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;
use vmm_sys_util::timerfd::TimerFd;

/// A subscriber of the loop.
pub type Subscriber = Arc<dyn EventSubscriber>;

/// The loop, with all that it waits for.
pub struct Loop {
    manager: EventManager<Subscriber>,
    lifecycle: Arc<Lifecycle>,
}

impl Loop {
    /// Waits for these, and for the machine's end.
    ///
    /// # Errors
    /// A process without room for one more descriptor.
    pub fn new(lifecycle: Arc<Lifecycle>, subscribers: Vec<Subscriber>) -> Result<Self> {
        let mut manager = EventManager::<Subscriber>::new().map_err(failed)?;
        for subscriber in subscribers {
            manager.add_subscriber(subscriber);
        }
        manager.add_subscriber(Arc::new(OnReadable { fd: lifecycle.ended.as_raw_fd() }));
        Ok(Self { manager, lifecycle })
    }

    /// Dispatches events until the machine has an ending.
    ///
    /// # Errors
    /// None that is known: epoll refuses nothing that it has taken.
    pub fn run(mut self) -> Result<()> {
        while self.lifecycle.ending().is_none() {
            match self.manager.run() {
                Ok(_) => {}
                Err(event_manager::Error::Epoll(e)) if e.errno() == libc::EINTR => {}
                Err(e) => return Err(failed(e)),
            }
        }
        Ok(())
    }
}

fn failed(e: event_manager::Error) -> Error {
    Error::new(format!("cannot wait for events ({e})"))
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
