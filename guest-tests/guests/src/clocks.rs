//! The clocks under test, each read as a guest kernel reads it.

use core::arch::asm;
use core::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering, fence};

use crate::{port, ring0};

/// TLFS 12.3: partition reference counter, 100 ns units.
pub const MSR_TIME_REF_COUNT: u32 = 0x4000_0020;
const MSR_GUEST_OS_ID: u32 = 0x4000_0000;
const MSR_REFERENCE_TSC: u32 = 0x4000_0021;
const MSR_TSC_FREQUENCY: u32 = 0x4000_0022;
/// TLFS 3.2: any non-zero identity; bit 63 says that it is an open-source kernel's.
const GUEST_OS_ID: u64 = 1 << 63;

const HPET_BASE: usize = 0xFED0_0000;
const HPET_CAPABILITIES: usize = 0x000;
const HPET_CONFIGURATION: usize = 0x010;
const HPET_COUNTER: usize = 0x0F0;
const PM_TIMER: u16 = 0x608;

/// The TSC, read after everything before it in program order.
#[inline(always)]
pub fn tsc() -> u64 {
    let (low, high): (u64, u64);
    // SAFETY: reads a counter; no memory is touched. (LFENCE is what Linux's rdtsc_ordered uses.)
    unsafe { asm!("lfence", "rdtsc", out("eax") low, out("edx") high, options(nostack)) };
    high << 32 | low
}

/// TSC frequency in Hz: what the hypervisor says, else what its page implies, else what the HPET
/// shows in 20 ms.
pub fn tsc_hz() -> Option<u64> {
    let told = ring0::rdmsr(MSR_TSC_FREQUENCY).filter(|&hz| hz != 0);
    let implied = || {
        let scale = PAGE.scale.load(Ordering::Relaxed);
        (scale != 0).then(|| ((10_000_000_u128 << 64) / u128::from(scale)) as u64)
    };
    told.or_else(implied).or_else(|| Some(Hpet::find()?.measure_tsc()))
}

/// TLFS 12.7: the reference TSC page, filled by the hypervisor.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct TscPage {
    /// 0: the page is not valid now, use the MSR.
    pub sequence: AtomicU32,
    reserved: u32,
    /// 2^64 × 100 ns units per TSC cycle.
    pub scale: AtomicU64,
    /// 100 ns units.
    pub offset: AtomicI64,
    rest: [u64; 509],
}

/// The page of this guest.
pub static PAGE: TscPage = TscPage {
    sequence: AtomicU32::new(0),
    reserved: 0,
    scale: AtomicU64::new(0),
    offset: AtomicI64::new(0),
    rest: [0; 509],
};

impl TscPage {
    /// Asks the hypervisor to fill the page; `None` if it does not know the MSRs.
    pub fn enable(&self) -> Option<()> {
        ring0::wrmsr(MSR_GUEST_OS_ID, GUEST_OS_ID)?;
        ring0::wrmsr(MSR_REFERENCE_TSC, core::ptr::from_ref(self) as u64 | 1)
    }

    /// The first TSC at which the page reads at least `time` (100 ns units).
    pub fn first_tsc_of(&self, time: u64) -> u64 {
        let scale = self.scale.load(Ordering::Relaxed).max(1);
        let units = time.wrapping_sub(self.offset.load(Ordering::Relaxed) as u64);
        (u128::from(units) << 64).div_ceil(u128::from(scale)) as u64
    }

    /// Reference time in 100 ns units; `None` while the page is not valid.
    #[inline(always)]
    pub fn read(&self) -> Option<u64> {
        loop {
            let sequence = self.sequence.load(Ordering::Acquire);
            if sequence == 0 {
                return None;
            }
            let scale = self.scale.load(Ordering::Relaxed);
            let offset = self.offset.load(Ordering::Relaxed);
            let tsc = tsc();
            fence(Ordering::Acquire);
            if self.sequence.load(Ordering::Relaxed) == sequence {
                let scaled = (u128::from(tsc) * u128::from(scale)) >> 64;
                return Some((scaled as u64).wrapping_add_signed(offset));
            }
        }
    }
}

/// The reference counter MSR, 100 ns units; `None` if there is none.
#[inline(always)]
pub fn msr() -> Option<u64> {
    ring0::rdmsr(MSR_TIME_REF_COUNT)
}

/// The HPET's registers.
#[derive(Debug, Clone, Copy)]
pub struct Hpet;

impl Hpet {
    /// Where the main counter is, for code that reads it elsewhere.
    pub const COUNTER_ADDRESS: u64 = (HPET_BASE + HPET_COUNTER) as u64;

    /// The HPET, if it answers with a period that the specification allows (IA-PC HPET 1.0a,
    /// 2.3.4). Starts the counter if it stands still.
    pub fn find() -> Option<Self> {
        let hpet = Self;
        let period_fs = hpet.read(HPET_CAPABILITIES) >> 32;
        if !(1..=0x05F5_E100).contains(&period_fs) {
            return None;
        }
        let configuration = hpet.read(HPET_CONFIGURATION);
        if configuration & 1 == 0 {
            hpet.write(HPET_CONFIGURATION, configuration | 1);
        }
        Some(hpet)
    }

    /// Femtoseconds per count.
    pub fn period_fs(self) -> u64 {
        self.read(HPET_CAPABILITIES) >> 32
    }

    fn measure_tsc(self) -> u64 {
        const FS_PER_S: u128 = 1_000_000_000_000_000;
        let wanted = FS_PER_S as u64 / 50 / self.period_fs();
        let (start, tsc_start) = (self.counter(), tsc());
        loop {
            let (counts, tsc) = (self.counter().wrapping_sub(start), tsc());
            if counts >= wanted {
                let fs = u128::from(counts) * u128::from(self.period_fs());
                return (u128::from(tsc.wrapping_sub(tsc_start)) * FS_PER_S / fs) as u64;
            }
        }
    }

    /// The main counter.
    #[inline(always)]
    pub fn counter(self) -> u64 {
        self.read(HPET_COUNTER)
    }

    /// The register at `offset`, in one 8-byte read.
    #[inline(always)]
    pub fn read(self, offset: usize) -> u64 {
        let value;
        // SAFETY: device space, mapped uncached; nothing of this program lives there. A plain
        // MOV, because the VMM has to emulate it.
        unsafe {
            asm!("mov {}, [{}]", out(reg) value, in(reg) HPET_BASE + offset, options(nostack));
        }
        value
    }

    /// Half a register, in one 4-byte read.
    pub fn read_half(self, offset: usize) -> u32 {
        let value;
        // SAFETY: as for `read`.
        unsafe {
            asm!("mov {:e}, [{}]", out(reg) value, in(reg) HPET_BASE + offset, options(nostack));
        }
        value
    }

    /// Writes half a register in one 4-byte write.
    pub fn write_half(self, offset: usize, value: u32) {
        // SAFETY: as for `write`.
        unsafe {
            asm!("mov [{}], {:e}", in(reg) HPET_BASE + offset, in(reg) value, options(nostack));
        }
    }

    /// Writes the register at `offset` in one 8-byte write.
    pub fn write(self, offset: usize, value: u64) {
        // SAFETY: as for `read`; this guest enables no interrupt that it cannot take.
        unsafe {
            asm!("mov [{}], {}", in(reg) HPET_BASE + offset, in(reg) value, options(nostack));
        }
    }
}

/// The ACPI PM timer; `None` if the port floats.
pub fn pm_timer() -> Option<u32> {
    Some(port::in32(PM_TIMER)).filter(|&ticks| ticks != u32::MAX)
}
