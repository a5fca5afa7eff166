//! The HPET on the board: its interrupts through KVM, its timers on a housekeeping
//! thread, and the page that `--hpet page` lets the guest read.

mod interrupts;
mod page;

use crate::cli::{HpetMode, RunOptions};
use crate::ending::Ending;
use crate::error::{Error, Result};
use crate::housekeeping::{self, Slot, Timers};
use crate::lifecycle::Lifecycle;
use crate::pinning::Place;
use crate::timeline::Timeline;
use devices::bus::{Device, Range};
use devices::hpet::{self, Hpet, TimerService};
use interrupts::KvmInterrupts;
use kvm_ioctls::VmFd;
use page::Page;
use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};

/// The device, and the thread that keeps its page.
pub struct Board {
    matches: Arc<Matches>,
    page: Option<Arc<Page>>,
    _publisher: Option<Publisher>,
}

/// The device's timers, as a housekeeping thread serves them.
struct Matches {
    device: Arc<Hpet>,
    looked: AtomicU64,
}

impl Timers for Matches {
    fn expire(&self) {
        self.looked.fetch_add(1, Ordering::Relaxed);
        self.device.expire();
    }
}

impl TimerService for Slot {
    fn set_deadline(&self, deadline_10ns: Option<u64>) {
        self.publish(deadline_10ns);
    }
}

/// What can be read of it while it works and afterwards.
#[derive(Clone)]
pub struct Meters {
    matches: Arc<Matches>,
    page: Option<Arc<Page>>,
}

/// The HPET as `--stats` shows it.
#[derive(Debug, Serialize)]
pub struct Report {
    /// How often its housekeeping thread looked for matches.
    pub timer_expiries: u64,
    /// The page, with `--hpet page`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub page: Option<page::Resolution>,
}

impl Board {
    /// Builds what `options` ask for. `memory_slot` is free, `timers` is where the
    /// device publishes when it next wants to be looked at.
    ///
    /// # Errors
    /// A host that lacks read-only slots, threads or memory.
    pub fn build(
        options: &RunOptions,
        vm: &Arc<VmFd>,
        memory_slot: u32,
        timers: Option<Slot>,
        lifecycle: &Arc<Lifecycle>,
        timeline: &Arc<Timeline>,
    ) -> Result<Option<Self>> {
        let Some(timers) = timers else { return Ok(None) };
        let page = match options.hpet {
            HpetMode::Page => Some(Page::map(vm, memory_slot, options.hpet_page_period)?),
            HpetMode::Off | HpetMode::Exit => None,
        };
        let page = page.map(Arc::new);
        if page.is_some() && thread::available_parallelism().is_ok_and(|cpus| cpus.get() == 1) {
            log::warn!(
                "--hpet page: there is one CPU for the guest and for the thread that stores the \
                 counter, which the guest may find standing still; use --hpet exit"
            );
        }
        let count = usize::from(options.hpet_timers);
        let interrupts = Arc::new(KvmInterrupts::new(vm.clone()));
        let device = Hpet::new(count, timeline.clone(), interrupts, Arc::new(timers));
        let device = Arc::new(match &page {
            Some(page) => device.with_mirror(page.clone()),
            None => device,
        });
        // The busy thread shares its CPU with as few timers as can be, and is no real-time
        // thread: it would let nobody else have that CPU.
        let cpus = options.housekeeping.as_ref().map_or(&[][..], |list| &list.0);
        let place = Place { cpu: cpus.last().copied(), rt_priority: None };
        let start = |page: &Arc<Page>| Publisher::start(page, place, lifecycle, timeline);
        let _publisher = page.as_ref().map(start).transpose()?;
        let matches = Arc::new(Matches { device, looked: AtomicU64::new(0) });
        Ok(Some(Self { matches, page, _publisher }))
    }

    /// The registers on the memory bus.
    pub fn range(&self) -> Range {
        Range {
            name: "hpet",
            base: hpet::BASE,
            len: hpet::LEN,
            device: self.matches.device.clone(),
        }
    }

    /// The low half of the capability register, which the ACPI table repeats.
    pub fn id(&self) -> u32 {
        let mut low = [0; 4];
        self.matches.device.read(0, &mut low);
        u32::from_le_bytes(low)
    }

    /// What can be read of it from other threads.
    pub fn meters(&self) -> Meters {
        Meters { matches: self.matches.clone(), page: self.page.clone() }
    }

    /// What a housekeeping thread serves.
    pub fn timers(&self) -> Arc<dyn Timers> {
        self.matches.clone()
    }
}

impl Meters {
    /// What was counted so far.
    pub fn report(&self) -> Report {
        Report {
            timer_expiries: self.matches.looked.load(Ordering::Relaxed),
            page: self.page.as_ref().map(|page| page.resolution()),
        }
    }
}

/// The thread that stores the counter; it is told to stop, and waited for, when its
/// owner goes.
struct Publisher {
    page: Arc<Page>,
    lifecycle: Arc<Lifecycle>,
    thread: Option<JoinHandle<()>>,
}

impl Publisher {
    fn start(
        page: &Arc<Page>,
        place: Place,
        lifecycle: &Arc<Lifecycle>,
        timeline: &Arc<Timeline>,
    ) -> Result<Self> {
        let (ready, when_ready) = mpsc::channel();
        let (own, time, life) = (page.clone(), timeline.clone(), lifecycle.clone());
        let work = move || {
            if housekeeping::settle(place, ready) {
                own.publish(&*time, &life);
            }
        };
        let thread = thread::Builder::new().name("hpet-page".into()).spawn(work).map_err(|e| {
            Error::new(format!("--hpet page: the host starts no thread for it ({e})"))
        })?;
        // Silence is a panic, which ends the process.
        when_ready.recv().unwrap_or(Ok(()))?;
        Ok(Self { page: page.clone(), lifecycle: lifecycle.clone(), thread: Some(thread) })
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        // It may wait for a machine to go on that was never finished.
        self.lifecycle.end(Ending::Refused("the machine was not finished".into()));
        self.page.stop();
        // A panic there has ended the process.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
