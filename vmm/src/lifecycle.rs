//! Whether the vCPUs run, wait or end, and how to reach one that is inside
//! KVM_RUN.
//!
//! A vCPU is reached by a signal whose handler sets `immediate_exit` in that
//! vCPU's `kvm_run`: a signal that comes a moment before KVM_RUN then ends it
//! at once instead of being lost (KVM API §5).

use crate::ending::Ending;
use crate::error::{Error, Result};
use kvm_bindings::kvm_run;
use std::cell::Cell;
use std::ptr;
use std::sync::atomic::{AtomicI32, AtomicU8, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

/// What vCPUs are to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum State {
    /// Wait for the machine's start. An AP may be inside KVM_RUN: it executes nothing.
    Starting,
    /// Run the guest.
    Running,
    /// Stay out of the guest until told otherwise.
    Paused,
    /// Return from the thread.
    Ending,
}

thread_local! {
    /// The `kvm_run` of the vCPU that this thread runs.
    static KVM_RUN: Cell<*mut kvm_run> = const { Cell::new(ptr::null_mut()) };
}

extern "C" fn on_kick(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    KVM_RUN.with(|run| {
        let run = run.get();
        if !run.is_null() {
            // SAFETY: non-null only between `Seat::new` and its drop, on this very
            // thread, while the vCPU's mapping exists; a volatile byte store is
            // what a signal handler may do.
            unsafe { ptr::addr_of_mut!((*run).immediate_exit).write_volatile(1) };
        }
    });
}

/// The signal that takes a vCPU out of the guest.
fn kick_signal() -> libc::c_int {
    SIGRTMIN()
}

/// Shared by the vCPU threads and whoever ends or pauses them.
///
/// Sequentially consistent on purpose: a thread that takes its seat while the
/// state changes either sees the new state or is seen and kicked.
#[derive(Debug)]
pub struct Lifecycle {
    state: AtomicU8,
    /// Thread ids of the vCPUs; 0 before the thread has a seat and after it left.
    threads: Vec<AtomicI32>,
    ending: Mutex<Option<Ending>>,
    /// How many vCPUs wait in `park`.
    parked: Mutex<usize>,
    changed: Condvar,
    /// Readable once an ending is set.
    pub ended: EventFd,
}

impl Lifecycle {
    /// For this many vCPUs, before the start: the boot vCPU does not enter the guest
    /// before all exist, for an INIT or SIPI sent to one that does not exist is lost.
    pub fn new(cpus: usize) -> Result<Self> {
        register_signal_handler(kick_signal(), on_kick)
            .map_err(|e| Error::new(format!("cannot handle the signal that stops vCPUs ({e})")))?;
        Ok(Self {
            state: AtomicU8::new(State::Starting as u8),
            threads: (0..cpus).map(|_| AtomicI32::new(0)).collect(),
            ending: Mutex::new(None),
            parked: Mutex::new(0),
            changed: Condvar::new(),
            ended: EventFd::new(EFD_NONBLOCK)
                .map_err(|e| Error::new(format!("cannot make an eventfd ({e})")))?,
        })
    }

    /// What vCPUs are to do now.
    pub fn state(&self) -> State {
        match self.state.load(Ordering::SeqCst) {
            0 => State::Starting,
            1 => State::Running,
            2 => State::Paused,
            _ => State::Ending,
        }
    }

    /// Ends the machine; the first reason given is the one that counts.
    pub fn end(&self, why: Ending) {
        self.ending.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(why);
        self.set(State::Ending);
        // Only an overflowing counter fails, and then the descriptor is readable.
        let _ = self.ended.write(1);
    }

    /// Why the machine ended, once it has.
    pub fn ending(&self) -> Option<Ending> {
        self.ending.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Takes every vCPU out of the guest and returns when all have stopped.
    pub fn pause(&self) {
        if self.set(State::Paused) {
            let mut parked = self.parked.lock().unwrap_or_else(PoisonError::into_inner);
            while *parked < self.threads.len() && self.state() == State::Paused {
                parked = self.changed.wait(parked).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Lets paused vCPUs go on.
    pub fn resume(&self) {
        self.set(State::Running);
    }

    /// Changes the state, unless the machine is ending, and reaches every vCPU.
    fn set(&self, state: State) -> bool {
        let parked = self.parked.lock().unwrap_or_else(PoisonError::into_inner);
        if self.state() == State::Ending && state != State::Ending {
            return false;
        }
        self.state.store(state as u8, Ordering::SeqCst);
        self.changed.notify_all();
        drop(parked);
        if state != State::Running {
            for thread in &self.threads {
                kick(thread.load(Ordering::SeqCst));
            }
        }
        true
    }

    fn stands(&self) -> bool {
        matches!(self.state(), State::Starting | State::Paused)
    }

    /// Called by a vCPU thread that found the state not running: waits while the
    /// machine stands, and tells whether to go on.
    pub fn park(&self) -> bool {
        let mut parked = self.parked.lock().unwrap_or_else(PoisonError::into_inner);
        *parked += 1;
        self.changed.notify_all();
        while self.stands() {
            parked = self.changed.wait(parked).unwrap_or_else(PoisonError::into_inner);
        }
        *parked -= 1;
        self.state() == State::Running
    }

    /// For threads that serve the vCPUs: returns once the machine runs or ends.
    pub fn wait_while_standing(&self) {
        let mut parked = self.parked.lock().unwrap_or_else(PoisonError::into_inner);
        while self.stands() {
            parked = self.changed.wait(parked).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Sends the kick to one thread of this process.
fn kick(thread: i32) {
    if thread != 0 {
        // SAFETY: tgkill reads no memory of ours; a thread that has gone since
        // gives ESRCH, and the process id keeps it inside this process.
        unsafe {
            libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, kick_signal());
        }
    }
}

/// A vCPU thread's registration: while it lives, kicks reach the vCPU.
#[derive(Debug)]
pub struct Seat<'a> {
    thread: &'a AtomicI32,
}

impl<'a> Seat<'a> {
    /// Registers the calling thread as the one that runs vCPU `index`.
    ///
    /// `run` must stay mapped until the seat is dropped; the caller owns the
    /// vCPU and drops the seat first.
    pub fn new(lifecycle: &'a Lifecycle, index: usize, run: *mut kvm_run) -> Self {
        KVM_RUN.with(|cell| cell.set(run));
        // SAFETY: gettid has no precondition.
        let id = unsafe { libc::gettid() };
        let thread = &lifecycle.threads[index];
        thread.store(id, Ordering::SeqCst);
        Self { thread }
    }
}

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        self.thread.store(0, Ordering::SeqCst);
        KVM_RUN.with(|cell| cell.set(ptr::null_mut()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn the_first_ending_counts_and_stops_everything() {
        let lifecycle = Lifecycle::new(1).unwrap();
        lifecycle.end(Ending::Timeout);
        lifecycle.end(Ending::PowerOff);
        lifecycle.resume();
        assert_eq!(lifecycle.ending(), Some(Ending::Timeout));
        assert_eq!(lifecycle.state(), State::Ending);
        assert!(!lifecycle.park());
    }

    #[test]
    fn pause_waits_for_every_vcpu_and_resume_lets_them_go() {
        let lifecycle = Arc::new(Lifecycle::new(2).unwrap());
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let lifecycle = lifecycle.clone();
                std::thread::spawn(move || {
                    loop {
                        if lifecycle.state() != State::Running && !lifecycle.park() {
                            return;
                        }
                        std::thread::yield_now();
                    }
                })
            })
            .collect();
        for _ in 0..100 {
            lifecycle.pause();
            assert_eq!(*lifecycle.parked.lock().unwrap(), 2);
            lifecycle.resume();
        }
        lifecycle.end(Ending::Quit);
        threads.into_iter().for_each(|t| t.join().unwrap());
    }
}
