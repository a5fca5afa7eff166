//! What the bare-metal guests share: boot code, console, clocks, statistics.
//!
//! Each program is one file in `src/bin` that names its `guest_main!`. It is entered in 64-bit
//! mode as the Linux boot protocol has it (RSI: zero page), runs in ring 3, takes `key=value`
//! words from the command line, prints one `@result {json}` line per result on COM1, and powers
//! off. `@panic` (a word that makes no sense, a device that is missing) and `@fault` (an
//! unexpected exception) end in a reset instead, so that no failure looks like success.
//!
//! | program | question | what must be zero or true |
//! |---|---|---|
//! | `guest-clock-cost` | what does one read of each clock cost? | `msr_behind`, `page_behind` |
//! | `guest-order` | does a timestamp handed round all vCPUs go back? | `backward`, `hpet_apart` |
//! | `guest-hpet-contention` | how do reads scale, alone or in a workload? | `backward` |
//! | `guest-timer` | how late is a timer's handler? | `early`, `lost`, `extra` |
//! | `guest-nmi-storm` | may an NMI handler read the clocks? | `backward` |
//! | `guest-hpet-conformance` | is the HPET what its specification says? | `failed`; every `pass` |
//! | `guest-smp` | do all vCPUs come up, with ids of their own? | `duplicate_ids`, `cpuid_mismatches` |
//! | `guest-tsc-write` | does the clock survive a guest that writes its TSC? | `msr_behind`, `page_behind` |
//! | `guest-hpet-ticks` | how many interrupts do periodic timers bring? | |
//! | `guest-drift` | what does each clock say at a moment that the VMM notes? | |
//! | `guest-memory` | what memory and initial RAM disk does it find? | |
//! | `guest-console-flood` | does a full console hold a vCPU up? | |
//! | `guest-echo` | what comes in at the console? | |
//! | `guest-flood` | does the VMM survive random accesses? | it ends |
//! | `guest-end` | what is the VMM's exit status? | |
//!
//! Guests need 2 MiB for themselves and 64 KiB per vCPU, from 2 MiB up.
#![no_std]

pub mod apic;
pub mod args;
pub mod clocks;
pub mod console;
pub mod cpu;
pub mod entry;
pub mod fault;
pub mod histogram;
pub mod ioapic;
pub mod mark;
mod mem;
pub mod order;
pub mod port;
pub mod power;
pub mod random;
pub mod ring0;
pub mod smp;
pub mod stats;

use args::Args;
use cpu::Cpu;

/// Prints a line on the console.
#[macro_export]
macro_rules! println {
    ($($arguments:tt)*) => {{
        use core::fmt::Write as _;
        let _ = core::writeln!($crate::console::Console, $($arguments)*);
    }};
}

/// Names the program's `fn(&Args, &'static Cpu)`, run by the boot processor; the machine is powered off when it returns.
#[macro_export]
macro_rules! guest_main {
    ($main:path) => {
        #[unsafe(no_mangle)]
        extern "Rust" fn guest_main(args: &$crate::args::Args, cpu: &'static $crate::cpu::Cpu) {
            $main(args, cpu)
        }
    };
}

unsafe extern "Rust" {
    safe fn guest_main(args: &Args, cpu: &'static Cpu);
}

#[unsafe(no_mangle)]
extern "C" fn bsp_entry(cpu: &'static Cpu, zero_page: *const u8) -> ! {
    fault::fill_interrupt_table();
    // SAFETY: RSI at entry is the zero page, by the boot protocol.
    let args = unsafe { Args::from_zero_page(zero_page) };
    guest_main(&args, cpu);
    power::off()
}

#[panic_handler]
fn panic(info: &core::panic::PanicInfo) -> ! {
    println!("@panic {info}");
    power::reboot()
}
