//! Application processors: started together by INIT and SIPI, each runs one job and halts.

use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};

use crate::apic::{Apic, Delivery, mask_legacy_pics};
use crate::args::Args;
use crate::clocks;
use crate::cpu::{Cpu, MAX_CPUS};
use crate::entry::TRAMPOLINE;
use crate::ring0;

/// With no `cpus=N`, this many cycles without a newcomer mean that all have come.
const QUIET_CYCLES: u64 = 1_000_000_000;
/// With `cpus=N`, those that are missing after this many quiet cycles are not coming.
const PATIENCE_CYCLES: u64 = 60_000_000_000;

unsafe extern "C" {
    static trampoline_start: u8;
    static trampoline_end: u8;
}

static ARRIVED: AtomicU32 = AtomicU32::new(1);
static FINISHED: AtomicU32 = AtomicU32::new(0);
static JOB: AtomicPtr<()> = AtomicPtr::new(core::ptr::null_mut());
static USES_X2APIC: AtomicBool = AtomicBool::new(true);

/// What a vCPU does once it runs.
pub type Job = fn(&'static Cpu);

/// The vCPUs that came up.
#[derive(Debug, Clone, Copy)]
pub struct Team {
    /// All of them, the BSP included.
    pub count: u32,
    /// From the first INIT to the last arrival in ring 3.
    pub cycles: u64,
}

/// The APIC mode that the guest uses, by the word `apic=xapic|x2apic` (default x2apic).
pub fn apic_from(args: &Args) -> Apic {
    match args.text("apic").unwrap_or("x2apic") {
        "x2apic" => Apic::X2,
        "xapic" => Apic::X,
        other => panic!("apic={other}: xapic or x2apic"),
    }
}

/// This vCPU's APIC, as [`start`] set it up.
pub fn apic() -> Apic {
    if USES_X2APIC.load(Ordering::Relaxed) { Apic::X2 } else { Apic::X }
}

/// Enables the BSP's APIC, starts every other vCPU on `job`, and waits for their arrival: for
/// `cpus=N` of them, or until nobody new comes.
pub fn start(args: &Args, bsp: &'static Cpu, job: Job) -> Team {
    let apic = apic_from(args);
    let expected = args.text("cpus").map(|_| args.number("cpus", 1));
    USES_X2APIC.store(apic == Apic::X2, Ordering::Relaxed);
    JOB.store(job as *mut (), Ordering::Release);
    mask_legacy_pics();
    check_in(bsp);
    // SAFETY: the trampoline's page is free RAM below 1 MiB that nothing else of the guest uses,
    // and the two symbols delimit its code.
    unsafe {
        let from = &raw const trampoline_start;
        let length = (&raw const trampoline_end).offset_from_unsigned(from);
        core::ptr::copy_nonoverlapping(from, TRAMPOLINE as *mut u8, length);
    }
    let start = clocks::tsc();
    apic.send_to_others(Delivery::Init);
    apic.send_to_others(Delivery::Startup((TRAMPOLINE >> 12) as u8));

    let mut count = ARRIVED.load(Ordering::Acquire);
    let mut changed = clocks::tsc();
    loop {
        let now = clocks::tsc();
        let arrived = ARRIVED.load(Ordering::Acquire);
        if arrived != count {
            (count, changed) = (arrived, now);
        }
        let patience = if expected.is_some() { PATIENCE_CYCLES } else { QUIET_CYCLES };
        let complete = expected.is_some_and(|expected| u64::from(count) >= expected);
        if complete || count == MAX_CPUS || now.wrapping_sub(changed) > patience {
            break;
        }
        core::hint::spin_loop();
    }
    let last = (0..count).map(|index| Cpu::at(index).arrival_tsc.load(Ordering::Relaxed)).max();
    Team { count, cycles: last.unwrap_or(start).saturating_sub(start) }
}

impl Team {
    /// Waits until every vCPU but the caller has returned from its job.
    pub fn join(self) {
        while FINISHED.load(Ordering::Acquire) + 1 < self.count {
            core::hint::spin_loop();
        }
    }
}

/// Lets vCPUs through once somebody has opened it.
#[derive(Debug)]
pub struct Gate(AtomicBool);

impl Gate {
    /// A closed one.
    pub const fn closed() -> Self {
        Self(AtomicBool::new(false))
    }

    /// Opens it for good, and publishes what the caller wrote before.
    pub fn open(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Returns once it is open.
    pub fn wait(&self) {
        while !self.0.load(Ordering::Acquire) {
            core::hint::spin_loop();
        }
    }
}

/// A value that one vCPU uses at a time.
#[derive(Debug)]
pub struct Locked<T> {
    taken: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: `with` is the only way to the value, and lets one vCPU in.
unsafe impl<T: Send> Sync for Locked<T> {}

impl<T> Locked<T> {
    /// Nobody has it.
    pub const fn new(value: T) -> Self {
        Self { taken: AtomicBool::new(false), value: UnsafeCell::new(value) }
    }

    /// Waits until nobody has the value, then runs `body` on it. Do not nest, nor use in handlers.
    pub fn with<R>(&self, body: impl FnOnce(&mut T) -> R) -> R {
        while self.taken.swap(true, Ordering::Acquire) {
            core::hint::spin_loop();
        }
        // SAFETY: whoever set `taken` has the value alone until it is cleared.
        let result = body(unsafe { &mut *self.value.get() });
        self.taken.store(false, Ordering::Release);
        result
    }
}

fn check_in(cpu: &Cpu) {
    let apic = apic();
    apic.enable();
    cpu.apic_id.store(apic.id(), Ordering::Relaxed);
    cpu.eoi_address.store(apic.eoi_address(), Ordering::Relaxed);
    cpu.arrival_tsc.store(clocks::tsc(), Ordering::Relaxed);
}

/// Where the boot code sends application processors.
#[unsafe(no_mangle)]
extern "C" fn ap_entry(cpu: &'static Cpu) -> ! {
    check_in(cpu);
    ARRIVED.fetch_add(1, Ordering::AcqRel);
    // SAFETY: `start` stored a `Job` before it sent the first INIT.
    let job = unsafe { core::mem::transmute::<*mut (), Job>(JOB.load(Ordering::Acquire)) };
    job(cpu);
    FINISHED.fetch_add(1, Ordering::AcqRel);
    ring0::halt_forever()
}
