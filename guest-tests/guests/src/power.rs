//! How a guest ends.

use crate::{port, ring0};

/// ACPI S5: SLP_TYP 5 and SLP_EN into PM1a control.
pub fn off() -> ! {
    port::out16(0x604, 5 << 10 | 1 << 13);
    ring0::halt_forever()
}

/// Pulses the reset line of the keyboard controller.
pub fn reboot() -> ! {
    port::out8(0x64, 0xFE);
    ring0::halt_forever()
}
