//! Timers that fire on CPUs of their own, not on those where vCPUs run.
//!
//! One thread per housekeeping CPU serves a fixed set of slots: the vCPUs' synthetic
//! and local APIC timers, and the HPET. A vCPU thread publishes a slot's deadline and
//! goes on; the housekeeping thread sleeps until the earliest of its deadlines and then
//! lets the slot's [`Timers`] fire. Its sleep arms the host's timer on the CPU where it
//! runs: a timer armed by the vCPU thread would interrupt the guest there.
//!
//! Which thread serves a slot is settled when the machine is built
//! ([`assignment`]); nothing is searched for when a timer is armed.

pub mod assignment;
mod desk;

use crate::error::{Error, Result};
use crate::host_cpus::{CpuList, HostCpus};
use crate::pinning::Place;
use crate::seccomp;
use crate::signals;
use desk::Desk;
use devices::clock::Clock;
use devices::deadlines::NEVER;
use serde::Serialize;
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Timers behind one slot.
pub trait Timers: Send + Sync {
    /// Fires what is due by now and publishes the next deadline on the slot.
    ///
    /// Called once for each published deadline that comes due, and at any other
    /// time: what is not due must not fire.
    fn expire(&self);
}

/// How housekeeping threads run.
#[derive(Debug, Clone, Copy, Default)]
pub struct Manner {
    /// SCHED_FIFO priority, if any.
    pub rt_priority: Option<u8>,
    /// How long before a deadline a thread stops sleeping and spins. After one it
    /// spins on for a multiple of that, for the next to be published.
    pub poll: Duration,
}

/// Where one source of deadlines publishes them.
#[derive(Debug, Clone)]
pub struct Slot {
    desk: Arc<Desk>,
    index: usize,
}

impl Slot {
    /// Sets the deadline in reference time, in units of 10 ns; `None` for none.
    /// Wakes the thread only if it would sleep beyond it.
    ///
    /// Call it under the lock that guards the timers behind the slot.
    #[inline]
    pub fn publish(&self, deadline_10ns: Option<u64>) {
        if self.desk.deadlines.publish(self.index, deadline_10ns.unwrap_or(NEVER)) {
            self.desk.wake();
        }
    }
}

/// Who will serve which slot; nobody does yet.
#[derive(Debug)]
pub struct Plan {
    desks: Vec<Arc<Desk>>,
    slots: Vec<Slot>,
    manner: Manner,
}

impl Plan {
    /// Assigns a slot to each of `places`, the CPU that its source runs on if that
    /// is known. There is a thread on each of `cpus`; if there are none, one anywhere
    /// serves all slots.
    pub fn new(cpus: &CpuList, places: &[Option<u32>], host: &HostCpus, manner: Manner) -> Self {
        let mut keepers: Vec<_> = cpus.0.iter().copied().map(Some).collect();
        if keepers.is_empty() && !places.is_empty() {
            keepers.push(None);
        }
        let servers = assignment::assign(places, &keepers, host);
        let mut counts = vec![0; keepers.len()];
        let indices: Vec<usize> = servers
            .iter()
            .map(|server| {
                counts[*server] += 1;
                counts[*server] - 1
            })
            .collect();
        let desks: Vec<_> = (keepers.iter().zip(counts))
            .map(|(cpu, count)| Arc::new(Desk::new(*cpu, count)))
            .collect();
        let slots = servers
            .iter()
            .zip(indices)
            .map(|(server, index)| Slot { desk: desks[*server].clone(), index })
            .collect();
        Self { desks, slots, manner }
    }

    /// The slots, in the order of the places asked for.
    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// Starts the threads. Slots without timers stay unserved.
    ///
    /// # Errors
    /// One line: a CPU or real-time scheduling out of reach, or no more threads.
    pub fn start(
        self,
        timers: Vec<(Slot, Arc<dyn Timers>)>,
        clock: &Arc<dyn Clock>,
    ) -> Result<Housekeeping> {
        let mut threads = Housekeeping { threads: Vec::new() };
        let (ready, when_ready) = mpsc::channel();
        for desk in &self.desks {
            let served = timers.iter().filter(|(slot, _)| Arc::ptr_eq(&slot.desk, desk));
            let mut bound: Vec<Option<Arc<dyn Timers>>> = vec![None; desk.deadlines.len()];
            served.for_each(|(slot, timers)| bound[slot.index] = Some(timers.clone()));
            let (desk, clock, ready) = (desk.clone(), clock.clone(), ready.clone());
            let manner = self.manner;
            let place = Place { cpu: desk.cpu, rt_priority: manner.rt_priority };
            let name = desk.cpu.map_or("hk".into(), |cpu| format!("hk-{cpu}"));
            let thread = {
                let desk = desk.clone();
                thread::Builder::new().name(name).spawn(move || {
                    if settle(place, ready) {
                        desk.serve(&*clock, &bound, manner.poll);
                    }
                })
            };
            let thread = thread.map_err(|e| {
                Error::new(format!("the host starts no more threads, for timers ({e})"))
            })?;
            desk.seat(thread.thread().clone());
            threads.threads.push((desk, thread));
        }
        drop(ready);
        when_ready.iter().collect::<Result<()>>()?;
        Ok(threads)
    }
}

/// What a thread on a housekeeping CPU does first: takes its place, tells whether it
/// could, and confines itself. Returns whether it is to go on.
pub(crate) fn settle(place: Place, ready: mpsc::Sender<Result<()>>) -> bool {
    signals::leave_to_main();
    let placed = place.take("--housekeeping");
    let good = placed.is_ok();
    // The receiver is gone only when another thread failed first.
    let told = ready.send(placed);
    drop(ready);
    let goes_on = good && told.is_ok();
    if goes_on {
        seccomp::enter(seccomp::Thread::Timers);
    }
    goes_on
}

/// The running threads; dropped, they end.
#[derive(Debug)]
pub struct Housekeeping {
    threads: Vec<(Arc<Desk>, JoinHandle<()>)>,
}

/// What one housekeeping thread did, for `--stats`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Tally {
    /// CPU that the thread is confined to, if any.
    pub cpu: Option<u32>,
    /// Times it woke up, for whatever reason.
    pub wakeups: u64,
    /// Times somebody else woke it for an earlier deadline.
    pub calls: u64,
    /// Deadlines that came due.
    pub due: u64,
}

impl Housekeeping {
    /// Reference time goes on after a stop, or at another rate: every deadline is
    /// looked at anew, for some are kept in another unit.
    pub fn clock_changed(&self) {
        self.threads.iter().for_each(|(desk, _)| desk.look_again());
    }

    /// What each thread did so far.
    pub fn tallies(&self) -> Vec<Tally> {
        self.threads.iter().map(|(desk, _)| desk.tally()).collect()
    }
}

impl Drop for Housekeeping {
    fn drop(&mut self) {
        self.threads.iter().for_each(|(desk, _)| desk.close());
        for (_, thread) in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// The CPUs that housekeeping threads run on: those asked for or, by default,
/// those that are allowed, not set apart by the kernel, and not some vCPU's own.
///
/// # Errors
/// A CPU that is not online.
pub fn cpus(
    asked: Option<&CpuList>,
    vcpus: &[Option<u32>],
    allowed: &CpuList,
    host: &HostCpus,
) -> Result<CpuList> {
    if let Some(asked) = asked {
        for cpu in &asked.0 {
            host.expect("--housekeeping", *cpu)?;
        }
        return Ok(asked.clone());
    }
    let usable: Vec<u32> =
        host.cpus.iter().map(|cpu| cpu.number).filter(|cpu| allowed.0.contains(cpu)).collect();
    let ordinary = usable.iter().copied().filter(|cpu| !host.set_apart.contains(cpu));
    let free = ordinary.filter(|cpu| !vcpus.contains(&Some(*cpu))).collect::<Vec<_>>();
    if free.is_empty() {
        log::warn!(
            "--pin leaves no CPU for timers, which now fire beside vCPUs: name one with \
             --housekeeping"
        );
        return Ok(CpuList(usable));
    }
    Ok(CpuList(free))
}

#[cfg(test)]
mod tests;
