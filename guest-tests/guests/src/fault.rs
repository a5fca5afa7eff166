//! The interrupt table, and what becomes of an unexpected exception.

use crate::entry::{CALL_VECTOR, TIMER_VECTOR};
use crate::{power, println};

unsafe extern "C" {
    fn exception_stubs();
    fn call_gate();
    fn nmi_stub();
    fn timer_stub();
    static mut interrupt_table: [[u64; 2]; 256];
}

const PRESENT: u64 = 1 << 47;
const INTERRUPT_GATE: u64 = 0xE << 40;
const RING0_CODE: u64 = 0x10 << 16;
const FROM_RING3: u64 = 3 << 45;
const ON_NMI_STACK: u64 = 1 << 32;
const EXCEPTION_STUB_BYTES: u64 = 16;

/// Fills the table that ring 0 has already loaded into IDTR.
pub(crate) fn fill_interrupt_table() {
    for vector in 0..32 {
        let stub = exception_stubs as *const () as u64 + vector * EXCEPTION_STUB_BYTES;
        set_gate(vector as usize, stub, 0);
    }
    set_gate(CALL_VECTOR.into(), call_gate as *const () as u64, FROM_RING3);
    set_gate(TIMER_VECTOR.into(), timer_stub as *const () as u64, 0);
    set_nmi_handler(nmi_stub);
}

/// Replaces the NMI handler: an assembly routine that ends in IRETQ and runs on its own stack.
/// For the BSP, before it starts other vCPUs and asks for NMIs.
pub fn set_nmi_handler(handler: unsafe extern "C" fn()) {
    set_gate(2, handler as *const () as u64, ON_NMI_STACK);
}

/// SDM vol. 3, 6.14.1: a 64-bit interrupt gate.
fn set_gate(vector: usize, handler: u64, flags: u64) {
    let low = (handler & 0xFFFF) | ((handler & 0xFFFF_0000) << 32);
    let gate = [low | RING0_CODE | INTERRUPT_GATE | PRESENT | flags, handler >> 32];
    // SAFETY: only the BSP writes the table, before it starts other vCPUs and before any
    // interrupt that it changes is enabled; an index beyond it panics.
    unsafe { (&raw mut interrupt_table[vector]).write_volatile(gate) };
}

/// Where the boot code sends every exception that nobody expected.
#[unsafe(no_mangle)]
extern "C" fn fault_entry(vector: u64, error: u64, rip: u64, cr2: u64) -> ! {
    println!("@fault vector {vector} error {error:#x} rip {rip:#x} cr2 {cr2:#x}");
    power::reboot()
}
