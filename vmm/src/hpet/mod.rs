//! The HPET on the board: its interrupts through KVM, its timer thread, and the
//! page that `--hpet page` lets the guest read.

mod alarm;
mod interrupts;
mod page;

use crate::cli::{HpetMode, RunOptions};
use crate::ending::Ending;
use crate::error::{Error, Result};
use crate::lifecycle::Lifecycle;
use crate::pinning::Place;
use crate::seccomp;
use crate::signals;
use crate::timeline::Timeline;
use alarm::Alarm;
use devices::bus::{Device, Range};
use devices::hpet::{self, Hpet};
use interrupts::KvmInterrupts;
use kvm_ioctls::VmFd;
use page::Page;
use serde::Serialize;
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};

/// The device and its threads.
pub struct Board {
    device: Arc<Hpet>,
    meters: Meters,
    _alarm: Helper,
    _publisher: Option<Helper>,
}

/// What can be read of it while it works and afterwards.
#[derive(Clone)]
pub struct Meters {
    alarm: Arc<Alarm>,
    page: Option<Arc<Page>>,
}

/// The HPET as `--stats` shows it.
#[derive(Debug, Serialize)]
pub struct Report {
    /// How often the timer thread looked for matches.
    pub timer_expiries: u64,
    /// The page, with `--hpet page`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub page: Option<page::Resolution>,
}

impl Board {
    /// Builds what `options` ask for; `slot` is a free memory slot.
    ///
    /// # Errors
    /// A host that lacks read-only slots, threads or memory.
    pub fn build(
        options: &RunOptions,
        vm: &Arc<VmFd>,
        slot: u32,
        lifecycle: &Arc<Lifecycle>,
        timeline: &Arc<Timeline>,
    ) -> Result<Option<Self>> {
        let page = match options.hpet {
            HpetMode::Off => return Ok(None),
            HpetMode::Exit => None,
            HpetMode::Page => Some(Arc::new(Page::map(vm, slot, options.hpet_page_period)?)),
        };
        if page.is_some() && thread::available_parallelism().is_ok_and(|cpus| cpus.get() == 1) {
            log::warn!(
                "--hpet page: there is one CPU for the guest and for the thread that stores the \
                 counter, which the guest may find standing still; use --hpet exit"
            );
        }
        let alarm = Arc::new(Alarm::new(timeline.clone()));
        let timers = usize::from(options.hpet_timers);
        let interrupts = Arc::new(KvmInterrupts::new(vm.clone()));
        let device = Hpet::new(timers, timeline.clone(), interrupts, alarm.clone());
        let device = Arc::new(match &page {
            Some(page) => device.with_mirror(page.clone()),
            None => device,
        });

        // The busy thread shares its CPU with as few timers as can be, and is no real-time
        // thread: it would let nobody else have that CPU.
        let cpus = options.housekeeping.as_ref().map_or(&[][..], |list| &list.0);
        let timer_place = Place { cpu: cpus.first().copied(), rt_priority: options.rt_prio };
        let page_place = Place { cpu: cpus.last().copied(), rt_priority: None };
        let _alarm = {
            let (own, other) = (alarm.clone(), alarm.clone());
            let (hands, life) = (device.clone(), lifecycle.clone());
            let work = move || own.run(&life, || hands.expire());
            Helper::start("hpet-timer", timer_place, lifecycle, work, move || other.stop())?
        };
        let publisher = |page: &Arc<Page>| {
            let (own, other) = (page.clone(), page.clone());
            let (time, life) = (timeline.clone(), lifecycle.clone());
            let work = move || own.publish(&*time, &life);
            Helper::start("hpet-page", page_place, lifecycle, work, move || other.stop())
        };
        let _publisher = page.as_ref().map(publisher).transpose()?;
        Ok(Some(Self { device, meters: Meters { alarm, page }, _alarm, _publisher }))
    }

    /// The registers on the memory bus.
    pub fn range(&self) -> Range {
        Range { name: "hpet", base: hpet::BASE, len: hpet::LEN, device: self.device.clone() }
    }

    /// The low half of the capability register, which the ACPI table repeats.
    pub fn id(&self) -> u32 {
        let mut low = [0; 4];
        self.device.read(0, &mut low);
        u32::from_le_bytes(low)
    }

    /// What can be read of it from other threads.
    pub fn meters(&self) -> Meters {
        self.meters.clone()
    }
}

impl Meters {
    /// What was counted so far.
    pub fn report(&self) -> Report {
        Report {
            timer_expiries: self.alarm.expiries(),
            page: self.page.as_ref().map(|page| page.resolution()),
        }
    }
}

/// A thread that is told to stop, and waited for, when its owner goes.
struct Helper {
    stop: Box<dyn Fn() + Send + Sync>,
    thread: Option<JoinHandle<()>>,
}

impl Helper {
    fn start(
        name: &str,
        place: Place,
        lifecycle: &Arc<Lifecycle>,
        work: impl FnOnce() + Send + 'static,
        stop: impl Fn() + Send + Sync + 'static,
    ) -> Result<Self> {
        let (ready, when_ready) = mpsc::channel();
        let seated = move || {
            signals::leave_to_main();
            let placed = place.take("--housekeeping");
            let good = placed.is_ok();
            // Its receiver waits for it.
            let _ = ready.send(placed);
            if good {
                seccomp::enter(seccomp::Thread::Timers);
                work();
            }
        };
        let thread = thread::Builder::new()
            .name(name.into())
            .spawn(seated)
            .map_err(|e| Error::new(format!("--hpet: the host starts no {name} thread ({e})")))?;
        // Silence is a panic, which ends the process.
        when_ready.recv().unwrap_or(Ok(()))?;
        let lifecycle = lifecycle.clone();
        let stop = Box::new(move || {
            // It may wait for a machine to go on that was never finished.
            lifecycle.end(Ending::Refused("the machine was not finished".into()));
            stop();
        });
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        (self.stop)();
        // A panic there has ended the process.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
