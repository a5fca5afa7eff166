//! The local APIC, through MMIO (xAPIC) or MSRs (x2APIC). Intel SDM vol. 3, chapter 11.

use core::arch::asm;

use crate::{port, ring0};

const MSR_APIC_BASE: u32 = 0x1B;
const MSR_X2APIC: u32 = 0x800;
const XAPIC_BASE: usize = 0xFEE0_0000;
const X2APIC_ENABLE: u64 = 1 << 10;

const ID: usize = 0x20;
const EOI: usize = 0xB0;
const SPURIOUS: usize = 0xF0;
const ICR: usize = 0x300;
const ICR_HIGH: usize = 0x310;
const LVT_TIMER: usize = 0x320;

const APIC_SOFTWARE_ENABLE: u32 = 1 << 8;
const ASSERT: u32 = 1 << 14;
const ALL_BUT_SELF: u32 = 3 << 18;

/// What an inter-processor interrupt does.
#[derive(Debug, Clone, Copy)]
pub enum Delivery {
    /// An interrupt with this vector.
    Fixed(u8),
    /// A non-maskable interrupt.
    Nmi,
    /// Reset to wait-for-SIPI.
    Init,
    /// Start in real mode at this page.
    Startup(u8),
}

impl Delivery {
    fn command(self) -> u32 {
        ASSERT
            | match self {
                Self::Fixed(vector) => u32::from(vector),
                Self::Nmi => 4 << 8,
                Self::Init => 5 << 8,
                Self::Startup(page) => 6 << 8 | u32::from(page),
            }
    }
}

/// This vCPU's local APIC, in one of its two modes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Apic {
    /// Registers at 0xFEE00000, 8-bit ids.
    X,
    /// Registers as MSRs, 32-bit ids.
    X2,
}

impl Apic {
    /// Switches the calling vCPU's APIC on, in this mode; panics if the VMM has no such mode.
    pub fn enable(self) {
        if self == Self::X2 {
            let base = ring0::rdmsr(MSR_APIC_BASE).unwrap_or_default();
            if ring0::wrmsr(MSR_APIC_BASE, base | X2APIC_ENABLE).is_none() {
                panic!("no x2APIC");
            }
        }
        self.write(SPURIOUS, APIC_SOFTWARE_ENABLE | 0xFF);
    }

    /// This vCPU's id.
    pub fn id(self) -> u32 {
        match self {
            Self::X => self.read(ID) >> 24,
            Self::X2 => self.read(ID),
        }
    }

    /// Sends an interrupt to one vCPU.
    pub fn send(self, id: u32, delivery: Delivery) {
        match self {
            Self::X => {
                self.write(ICR_HIGH, id << 24);
                self.write(ICR, delivery.command());
            }
            Self::X2 => self.write_msr(ICR, u64::from(id) << 32 | u64::from(delivery.command())),
        }
    }

    /// Sends an interrupt to every vCPU but this one.
    pub fn send_to_others(self, delivery: Delivery) {
        match self {
            Self::X => self.write(ICR, delivery.command() | ALL_BUT_SELF),
            Self::X2 => self.write_msr(ICR, (delivery.command() | ALL_BUT_SELF).into()),
        }
    }

    /// Sets the timer's local vector table entry.
    pub fn set_timer_entry(self, entry: u32) {
        self.write(LVT_TIMER, entry);
    }

    /// Where the interrupt stub writes EOI; 0 means MSR 0x80B.
    pub fn eoi_address(self) -> u64 {
        match self {
            Self::X => (XAPIC_BASE + EOI) as u64,
            Self::X2 => 0,
        }
    }

    fn read(self, register: usize) -> u32 {
        match self {
            Self::X => {
                let value;
                // SAFETY: device space, mapped uncached; nothing of this program lives there.
                unsafe {
                    asm!("mov {:e}, [{}]", out(reg) value, in(reg) XAPIC_BASE + register,
                        options(nostack));
                }
                value
            }
            Self::X2 => ring0::rdmsr(x2apic(register)).unwrap_or_default() as u32,
        }
    }

    fn write(self, register: usize, value: u32) {
        match self {
            // SAFETY: as for `read`; the interrupts that this enables have handlers.
            Self::X => unsafe {
                asm!("mov [{}], {:e}", in(reg) XAPIC_BASE + register, in(reg) value,
                    options(nostack));
            },
            Self::X2 => self.write_msr(register, value.into()),
        }
    }

    fn write_msr(self, register: usize, value: u64) {
        assert!(ring0::wrmsr(x2apic(register), value).is_some(), "x2APIC register {register:#x}");
    }
}

/// SDM vol. 3, table 11-6: one MSR per 16-byte register.
fn x2apic(register: usize) -> u32 {
    MSR_X2APIC + (register >> 4) as u32
}

/// Masks both 8259s: the guests take no interrupt from them.
pub fn mask_legacy_pics() {
    port::out8(0x21, 0xFF);
    port::out8(0xA1, 0xFF);
}
