//! What the bare-metal guests share: boot code, console, clocks, statistics.
//!
//! Each program is one file in `src/bin` that ends in `guest_main!(main)`. It is entered in 64-bit
//! mode as the Linux boot protocol has it (RSI: zero page), runs in ring 3, prints one
//! `@result {json}` line per result on COM1, and powers off.
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
