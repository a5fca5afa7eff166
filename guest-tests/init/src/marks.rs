//! The VMM's mark port: it notes the time and its exit counts for each byte.

use std::arch::asm;

/// Port of the VMM's mark device.
const PORT: u16 = 0x5F0;

/// /init runs (the VMM's `devices/src/marks.rs` names the bytes).
pub const INIT: u8 = 0xF1;

/// Writes one mark; where the kernel does not let us there are no marks, and the
/// host sees that none came. (/dev/port is no way: cloud kernels leave it out.)
pub fn mark(number: u8) {
    // SAFETY: asks for one port, for this thread; no memory is passed.
    if unsafe { libc::ioperm(PORT.into(), 1, 1) } == 0 {
        // SAFETY: the kernel has just granted the port, which no device but the
        // VMM's decodes.
        unsafe { asm!("out dx, al", in("dx") PORT, in("al") number, options(nomem, nostack)) };
    }
}
