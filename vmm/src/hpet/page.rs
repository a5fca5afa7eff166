//! `--hpet page`: the registers in a read-only memory slot. Reads hit memory,
//! writes still exit and reach the device.
//!
//! A thread stores the counter, in one 64-bit store, again and again: a guest
//! sees no half of it, and whoever reads 32 bits sees a half of one value. The
//! device keeps the other registers in step, and holds the thread while the
//! counter is halted, started or written, so that no store of an old view comes
//! after a new value. The price is one busy CPU while the counter runs.

use crate::error::{Error, Result};
use crate::lifecycle::{Lifecycle, State};
use devices::clock::Clock;
use devices::hpet::{BASE, COUNTER_OFFSET, CounterView, IMAGE_WORDS, LEN, Mirror};
use kvm_bindings::{KVM_MEM_READONLY, kvm_userspace_memory_region};
use kvm_ioctls::{Cap, VmFd};
use serde::Serialize;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use vm_memory::{MmapRegion, VolatileMemory};

const COUNTER_WORD: usize = COUNTER_OFFSET as usize / 8;
/// A period from here on is slept, a shorter one is spun: 100 µs.
const SLEPT_10NS: u64 = 10_000;
/// Stores between two updates of what [`Page::resolution`] tells.
const STORES_PER_NOTE: u64 = 4096;

/// The page, and who writes the counter into it.
pub struct Page {
    memory: MmapRegion<()>,
    period_10ns: u64,
    writer: Mutex<Writer>,
    changed: Condvar,
    /// The thread is to stop storing; changes under the lock only.
    hold: AtomicBool,
    stores: AtomicU64,
    spent_10ns: AtomicU64,
    longest_10ns: AtomicU64,
}

#[derive(Default)]
struct Writer {
    /// What the thread stores; `None` while the counter is held or halted.
    view: Option<CounterView>,
    /// The thread stores without the lock.
    storing: bool,
    stopping: bool,
}

/// How fine the counter in the page was.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Resolution {
    /// Period asked for, in ns; 0: as short as one thread sustains.
    pub period_ns: u64,
    /// Stores of the counter.
    pub stores: u64,
    /// Time from one store to the next, in ns, on average.
    pub mean_ns: f64,
    /// The longest, in ns: the thread was off its CPU.
    pub longest_ns: u64,
}

impl std::fmt::Display for Resolution {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { period_ns: _, stores, mean_ns, longest_ns } = self;
        write!(f, "{stores} stores, {mean_ns:.1} ns apart on average, {longest_ns} ns at most")
    }
}

impl Page {
    /// Maps the page into the guest, as memory slot `slot`.
    ///
    /// # Errors
    /// A host without read-only slots.
    pub fn map(vm: &VmFd, slot: u32, period_ns: u64) -> Result<Self> {
        if !vm.check_extension(Cap::ReadonlyMem) {
            return Err(Error::new(
                "--hpet page: this host's KVM has no read-only memory slots \
                 (KVM_CAP_READONLY_MEM); use --hpet exit",
            ));
        }
        let failed = |e: &dyn std::fmt::Display| {
            Error::new(format!("--hpet page: cannot map the page ({e}); use --hpet exit"))
        };
        let page = Self::new(period_ns).map_err(|e| failed(&e))?;
        let region = kvm_userspace_memory_region {
            slot,
            flags: KVM_MEM_READONLY,
            guest_phys_addr: BASE,
            memory_size: LEN,
            userspace_addr: page.memory.as_ptr() as u64,
        };
        // SAFETY: the mapping lives as long as the device, which the vCPU threads share: none
        // of them runs when it goes. Nothing else lies at these addresses (`layout`).
        unsafe { vm.set_user_memory_region(region) }.map_err(|e| failed(&e))?;
        Ok(page)
    }

    fn new(period_ns: u64) -> std::result::Result<Self, impl std::fmt::Display + use<>> {
        MmapRegion::new(LEN as usize).map(|memory| Self {
            memory,
            period_10ns: period_ns.div_ceil(10),
            writer: Mutex::default(),
            changed: Condvar::new(),
            hold: AtomicBool::new(false),
            stores: AtomicU64::new(0),
            spent_10ns: AtomicU64::new(0),
            longest_10ns: AtomicU64::new(0),
        })
    }

    /// What was measured so far.
    pub fn resolution(&self) -> Resolution {
        let stores = self.stores.load(Ordering::Relaxed);
        let spent_ns = self.spent_10ns.load(Ordering::Relaxed) as f64 * 10.0;
        Resolution {
            period_ns: self.period_10ns * 10,
            stores,
            mean_ns: spent_ns / stores.max(1) as f64,
            longest_ns: self.longest_10ns.load(Ordering::Relaxed) * 10,
        }
    }

    /// Stores the counter until [`Page::stop`]; the thread's work. It sleeps while
    /// the counter is halted or the machine is paused.
    pub fn publish(&self, clock: &dyn Clock, lifecycle: &Lifecycle) {
        // What was stored is never taken back, not even by a clock that stopped a moment before.
        let mut latest = 0;
        let mut writer = self.lock();
        while !writer.stopping {
            let Some(view) = writer.view else {
                writer = self.changed.wait(writer).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            match lifecycle.state() {
                State::Running => {}
                State::Starting | State::Paused => {
                    drop(writer);
                    lifecycle.wait_while_standing();
                    writer = self.lock();
                    continue;
                }
                State::Ending => break,
            }
            if self.period_10ns >= SLEPT_10NS {
                latest = latest.max(clock.now_10ns());
                self.store(view.at(latest));
                let period = Duration::from_nanos(self.period_10ns * 10);
                let slept = self.changed.wait_timeout(writer, period);
                writer = slept.unwrap_or_else(PoisonError::into_inner).0;
                let gap = clock.now_10ns().saturating_sub(latest);
                // A shorter sleep was ended by a write of the guest.
                if gap >= self.period_10ns {
                    self.note(1, gap, gap);
                }
                continue;
            }
            writer.storing = true;
            drop(writer);
            latest = self.store_until_held(view, clock, lifecycle, latest);
            writer = self.lock();
            writer.storing = false;
            self.changed.notify_all();
        }
    }

    /// The busy loop; returns the time that it stored last, at least `latest`.
    fn store_until_held(
        &self,
        view: CounterView,
        clock: &dyn Clock,
        lifecycle: &Lifecycle,
        latest: u64,
    ) -> u64 {
        let (mut stores, mut spent, mut longest) = (0, 0, 0);
        let mut last = latest.max(clock.now_10ns());
        while !self.hold.load(Ordering::Acquire) && lifecycle.state() == State::Running {
            let now = clock.now_10ns().max(last);
            let gap = now - last;
            if gap < self.period_10ns {
                std::hint::spin_loop();
                continue;
            }
            self.store(view.at(now));
            last = now;
            (stores, spent, longest) = (stores + 1, spent + gap, gap.max(longest));
            if stores == STORES_PER_NOTE {
                self.note(stores, spent, longest);
                (stores, spent, longest) = (0, 0, 0);
            }
        }
        self.note(stores, spent, longest);
        last
    }

    fn store(&self, counter: u64) {
        self.word(COUNTER_WORD).store(counter.to_le(), Ordering::Release);
    }

    /// Only the thread counts: no locked instruction.
    fn note(&self, stores: u64, spent_10ns: u64, longest_10ns: u64) {
        let add = |cell: &AtomicU64, more| {
            cell.store(cell.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
        };
        add(&self.stores, stores);
        add(&self.spent_10ns, spent_10ns);
        self.longest_10ns.fetch_max(longest_10ns, Ordering::Relaxed);
    }

    /// Makes [`Page::publish`] return.
    pub fn stop(&self) {
        let mut writer = self.lock();
        writer.stopping = true;
        self.hold.store(true, Ordering::Release);
        drop(writer);
        self.changed.notify_all();
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        #[expect(clippy::expect_used, reason = "IMAGE_WORDS lie within the page, page-aligned")]
        self.memory.get_atomic_ref(index * 8).expect("a word of the page")
    }

    fn lock(&self) -> MutexGuard<'_, Writer> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

const _: () = assert!(IMAGE_WORDS * 8 <= LEN as usize);

impl Mirror for Page {
    fn hold_counter(&self) {
        let mut writer = self.lock();
        writer.view = None;
        self.hold.store(true, Ordering::Release);
        while writer.storing {
            writer = self.changed.wait(writer).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn update(&self, image: &[u64; IMAGE_WORDS], counter: CounterView) {
        let mut writer = self.lock();
        for (index, value) in image.iter().enumerate() {
            if index != COUNTER_WORD || !writer.storing {
                self.word(index).store(value.to_le(), Ordering::Release);
            }
        }
        let started = writer.view.is_none() && counter.running;
        writer.view = counter.running.then_some(counter);
        if !writer.stopping {
            self.hold.store(false, Ordering::Release);
        }
        if started {
            self.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ending::Ending;
    use devices::bus::Device;
    use devices::hpet::Hpet;
    use devices::testing::Recorder;
    use std::sync::Arc;
    use std::time::Instant;

    const CONFIG: u64 = 0x10;
    const COMPARATOR: u64 = 0x108;

    struct Monotonic(Instant);

    impl Clock for Monotonic {
        fn now_10ns(&self) -> u64 {
            (self.0.elapsed().as_nanos() / 10) as u64
        }
    }

    /// A device with a page, a thread that publishes, and a machine that runs.
    struct Parts {
        page: Arc<Page>,
        device: Arc<Hpet>,
        lifecycle: Lifecycle,
    }

    impl Parts {
        fn write(&self, offset: u64, value: u64) {
            self.device.write(offset, &value.to_le_bytes());
        }

        /// What a guest reads.
        fn read(&self, offset: u64) -> u64 {
            self.page.word(offset as usize / 8).load(Ordering::Acquire)
        }

        fn counter(&self) -> u64 {
            self.read(COUNTER_OFFSET)
        }

        /// Returns when the counter in the page has left `value`.
        fn wait_for_change_from(&self, value: u64) {
            let started = Instant::now();
            while self.counter() == value {
                assert!(started.elapsed() < Duration::from_secs(20), "the counter stands still");
            }
        }
    }

    struct Stop<'a>(&'a Parts);

    impl Drop for Stop<'_> {
        fn drop(&mut self) {
            self.0.lifecycle.end(Ending::Quit);
            self.0.page.stop();
        }
    }

    fn with_page(period_ns: u64, test: impl FnOnce(&Parts)) -> Resolution {
        let page = Arc::new(Page::new(period_ns).map_err(|e| e.to_string()).unwrap());
        let clock = Arc::new(Monotonic(Instant::now()));
        let recorder = Arc::new(Recorder::default());
        let device = Hpet::new(3, clock.clone(), recorder.clone(), recorder);
        let device = Arc::new(device.with_mirror(page.clone()));
        let parts = Parts { page, device, lifecycle: Lifecycle::new(0).unwrap() };
        parts.lifecycle.resume();
        std::thread::scope(|scope| {
            let _stop = Stop(&parts);
            scope.spawn(|| parts.page.publish(&*clock, &parts.lifecycle));
            test(&parts);
        });
        parts.page.resolution()
    }

    #[test]
    fn the_counter_runs_stands_and_takes_values_as_the_device_does() {
        for period_ns in [0, 1000, 200_000] {
            let measured = with_page(period_ns, |p| {
                assert_eq!(p.counter(), 0);
                p.write(CONFIG, 1);
                p.wait_for_change_from(0);
                p.write(CONFIG, 0);
                let halted = p.counter();
                assert_eq!(halted, p.device.counter());
                p.write(COUNTER_OFFSET, 0x1234_5678_9abc_def0);
                assert_eq!(p.counter(), 0x1234_5678_9abc_def0);
                p.write(CONFIG, 1);
                p.wait_for_change_from(0x1234_5678_9abc_def0);
                assert!(p.counter() > 0x1234_5678_9abc_def0);
            });
            assert!(measured.stores == 0 || measured.mean_ns >= period_ns as f64, "{measured:?}");
        }
    }

    #[test]
    fn other_registers_follow_writes_while_the_counter_runs() {
        with_page(0, |p| {
            let mut low = [0; 8];
            p.device.read(0, &mut low);
            assert_eq!(p.read(0), u64::from_le_bytes(low));
            p.write(CONFIG, 1);
            for value in 1..1000 {
                p.write(COMPARATOR, value << 40);
                assert_eq!(p.read(COMPARATOR), value << 40);
            }
        });
    }

    #[test]
    fn a_reader_never_sees_the_counter_go_back() {
        with_page(0, |p| {
            p.write(CONFIG, 1);
            let done = AtomicBool::new(false);
            std::thread::scope(|scope| {
                let reader = scope.spawn(|| {
                    let (mut last, mut backward, mut steps) = (0, 0_u64, 0_u64);
                    while !done.load(Ordering::Relaxed) {
                        let value = p.counter();
                        backward += u64::from(value < last);
                        steps += u64::from(value > last);
                        last = value;
                    }
                    (backward, steps)
                });
                for round in 0..2000_u64 {
                    p.write(CONFIG, 0);
                    let halted = p.counter();
                    assert_eq!(halted, p.device.counter(), "round {round}");
                    // Forward by more than passes between this and the next look.
                    p.write(COUNTER_OFFSET, halted + (1 << 40));
                    p.write(CONFIG, 1);
                    p.write(COUNTER_OFFSET, halted + (1 << 41));
                }
                done.store(true, Ordering::Relaxed);
                let (backward, steps) = reader.join().unwrap();
                assert_eq!(backward, 0);
                assert!(steps > 0);
            });
        });
    }

    #[test]
    fn a_paused_machine_costs_no_store() {
        with_page(0, |p| {
            p.write(CONFIG, 1);
            p.wait_for_change_from(0);
            p.lifecycle.pause();
            // The thread may be about to store once more.
            let started = Instant::now();
            while p.page.lock().storing {
                assert!(started.elapsed() < Duration::from_secs(20), "it goes on storing");
            }
            let still = p.counter();
            std::thread::sleep(Duration::from_millis(5));
            assert_eq!(p.counter(), still);
            p.lifecycle.resume();
            p.wait_for_change_from(still);
        });
    }
}
