//! Counts the vCPUs that INIT and SIPI start, and compares their APIC ids with each other and
//! with CPUID.
//!
//! Words: `cpus` (how many to wait for), `apic=xapic|x2apic`.
#![no_std]
#![no_main]

use core::arch::global_asm;
use core::sync::atomic::{AtomicU64, Ordering};

use guests::args::Args;
use guests::console::ResultLine;
use guests::cpu::{Cpu, MAX_CPUS};
use guests::{guest_main, ring0, smp};

guest_main!(main);

/// One bit per id: beyond this, an id is reported as out of range.
const IDS: usize = 4096;

unsafe extern "C" {
    fn r0_cpuid_apic_ids();
}

global_asm!(
    ".text",
    // rax: CPUID.1:EBX[31:24], rdx: CPUID.0BH:EDX. In ring 0, because some hosts answer CPUID in
    // ring 3 with the host's own.
    ".global r0_cpuid_apic_ids",
    "r0_cpuid_apic_ids:",
    "  push rbx",
    "  mov eax, 1",
    "  xor ecx, ecx",
    "  cpuid",
    "  shr ebx, 24",
    "  mov r8, rbx",
    "  mov eax, 0xB",
    "  xor ecx, ecx",
    "  cpuid",
    "  mov rax, r8",
    "  pop rbx",
    "  ret",
);

static MISMATCHES: AtomicU64 = AtomicU64::new(0);

fn main(args: &Args, cpu: &'static Cpu) {
    let team = smp::start(args, cpu, compare_with_cpuid);
    team.join();
    compare_with_cpuid(cpu);

    let mut seen = [0_u64; IDS / 64];
    let (mut duplicates, mut out_of_range, mut highest) = (0_u32, 0_u32, 0_u32);
    for index in 0..team.count {
        let id = Cpu::at(index).apic_id.load(Ordering::Relaxed);
        highest = highest.max(id);
        match seen.get_mut(id as usize / 64) {
            Some(word) => {
                duplicates += u32::from(*word >> (id % 64) & 1 == 1);
                *word |= 1 << (id % 64);
            }
            None => out_of_range += 1,
        }
    }
    ResultLine::new("smp")
        .number("cpus", team.count)
        .number("duplicate_ids", duplicates)
        .number("ids_out_of_range", out_of_range)
        .number("highest_id", highest)
        .number("cpuid_mismatches", MISMATCHES.load(Ordering::Relaxed))
        .number("cycles", team.cycles)
        .number("limit", MAX_CPUS)
        .end();
}

fn compare_with_cpuid(cpu: &'static Cpu) {
    let id = u64::from(cpu.apic_id.load(Ordering::Relaxed));
    // SAFETY: no arguments; clobbers what the convention allows.
    let (initial, extended) = unsafe { ring0::call(r0_cpuid_apic_ids, [0; 3]) };
    if initial != id & 0xFF || extended & 0xFFFF_FFFF != id {
        MISMATCHES.fetch_add(1, Ordering::Relaxed);
    }
}
