//! The interrupt table, and what becomes of an unexpected exception.

use crate::entry::{CALL_VECTOR, TIMER_VECTOR};
use crate::{power, println};

unsafe extern "C" {
    fn exception_stubs();
    fn call_gate();
    fn timer_stub();
    static mut interrupt_table: [[u64; 2]; 256];
}

const PRESENT: u64 = 1 << 47;
const INTERRUPT_GATE: u64 = 0xE << 40;
const RING0_CODE: u64 = 0x10 << 16;
const FROM_RING3: u64 = 3 << 45;
const EXCEPTION_STUB_BYTES: u64 = 16;

/// SDM vol. 3, 6.14.1: 64-bit interrupt gates. Ring 0 has already loaded IDTR with this table.
pub(crate) fn fill_interrupt_table() {
    let gate = |handler: u64, flags: u64| {
        let low = handler & 0xFFFF | (handler & 0xFFFF_0000) << 32;
        [low | RING0_CODE | INTERRUPT_GATE | PRESENT | flags, handler >> 32]
    };
    let set = |vector: usize, entry: [u64; 2]| {
        // SAFETY: only the BSP writes the table, before it starts other vCPUs and before any
        // interrupt is enabled; the index is below 256.
        unsafe { (&raw mut interrupt_table[vector]).write_volatile(entry) };
    };
    for vector in 0..32 {
        let stub = exception_stubs as *const () as u64 + vector * EXCEPTION_STUB_BYTES;
        set(vector as usize, gate(stub, 0));
    }
    set(CALL_VECTOR.into(), gate(call_gate as *const () as u64, FROM_RING3));
    set(TIMER_VECTOR.into(), gate(timer_stub as *const () as u64, 0));
}

/// Where the boot code sends every exception that nobody expected.
#[unsafe(no_mangle)]
extern "C" fn fault_entry(vector: u64, error: u64, rip: u64, cr2: u64) -> ! {
    println!("@fault vector {vector} error {error:#x} rip {rip:#x} cr2 {cr2:#x}");
    power::reboot()
}
