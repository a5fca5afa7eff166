//! The I/O APIC at 0xFEC00000 (82093AA datasheet, 3.2).

use core::arch::asm;

const SELECT: usize = 0xFEC0_0000;
const WINDOW: usize = 0xFEC0_0010;
const REDIRECTION: u32 = 0x10;
const MASKED: u32 = 1 << 16;

/// Sends edges of `pin` to one vCPU as `vector`. The id fits 8 bits here.
pub fn route(pin: u32, vector: u8, apic_id: u32) {
    write(REDIRECTION + 2 * pin + 1, apic_id << 24);
    write(REDIRECTION + 2 * pin, vector.into());
}

/// Masks `pin`.
pub fn mask(pin: u32) {
    write(REDIRECTION + 2 * pin, MASKED);
}

fn write(register: u32, value: u32) {
    // SAFETY: device space, mapped uncached; the vectors in use have handlers.
    unsafe {
        asm!("mov [{}], {:e}", in(reg) SELECT, in(reg) register, options(nostack));
        asm!("mov [{}], {:e}", in(reg) WINDOW, in(reg) value, options(nostack));
    }
}
