//! Port I/O from ring 3 (the TSS's bitmap opens ports up to 0x7FF).

use core::arch::asm;

/// Writes one byte.
pub fn out8(port: u16, value: u8) {
    // SAFETY: a port write does not touch this program's memory.
    unsafe { asm!("out dx, al", in("dx") port, in("al") value, options(nomem, nostack)) };
}

/// Writes two bytes.
pub fn out16(port: u16, value: u16) {
    // SAFETY: a port write does not touch this program's memory.
    unsafe { asm!("out dx, ax", in("dx") port, in("ax") value, options(nomem, nostack)) };
}

/// Reads one byte.
pub fn in8(port: u16) -> u8 {
    let value;
    // SAFETY: a port read does not touch this program's memory.
    unsafe { asm!("in al, dx", in("dx") port, out("al") value, options(nomem, nostack)) };
    value
}

/// Reads four bytes.
pub fn in32(port: u16) -> u32 {
    let value;
    // SAFETY: a port read does not touch this program's memory.
    unsafe { asm!("in eax, dx", in("dx") port, out("eax") value, options(nomem, nostack)) };
    value
}
