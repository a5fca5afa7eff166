//! The hostile guest: random MSR, port and HPET accesses of every width, as fast as they go.
//!
//! Words: `count` (10 000 accesses), `seed` (1). What it avoids is what would end the run by the
//! rules (power-off, reset) or destroy the guest itself; the console's registers stay untouched
//! so that the result line can be read.
#![no_std]
#![no_main]

use core::arch::asm;

use guests::args::Args;
use guests::clocks::PAGE;
use guests::console::ResultLine;
use guests::cpu::Cpu;
use guests::random::Random;
use guests::{guest_main, ring0};

guest_main!(main);

const HPET: u64 = 0xFED0_0000;
const PORTS: u64 = 0x800;

fn main(args: &Args, _cpu: &'static Cpu) {
    let count = args.number("count", 10_000);
    let mut random = Random(args.number("seed", 1));
    let (mut faults, mut ports, mut mmio) = (0_u64, 0_u64, 0_u64);
    for _ in 0..count {
        match random.below(4) {
            0 => faults += u64::from(msr(&mut random).is_none()),
            1 => faults += u64::from(synthetic_msr(&mut random).is_none()),
            2 => ports += u64::from(port(&mut random)),
            _ => {
                device_space(&mut random);
                mmio += 1;
            }
        }
    }
    ResultLine::new("flood")
        .number("accesses", count)
        .number("msr_faults", faults)
        .number("ports", ports)
        .number("mmio", mmio)
        .end();
}

/// Any MSR is read. Only those are written that neither the CPU nor the APIC has.
fn msr(random: &mut Random) -> Option<()> {
    let msr = random.bits() as u32;
    match random.below(2) {
        0 => ring0::rdmsr(msr).map(drop),
        _ => ring0::wrmsr(msr | 0x2000_0000, random.bits()),
    }
}

/// The hypervisor's range, with values that look like addresses: none, absurd, or a page of ours.
fn synthetic_msr(random: &mut Random) -> Option<()> {
    let msr = 0x4000_0000 + random.below(0x200) as u32;
    let low_bits = random.below(0x1000);
    let value = match random.below(4) {
        0 => 0,
        1 => u64::MAX,
        2 => (random.bits() | 1 << 45) & !0xFFF | low_bits,
        _ => core::ptr::from_ref(&PAGE) as u64 | low_bits,
    };
    match random.below(3) {
        0 => ring0::rdmsr(msr).map(drop),
        _ => ring0::wrmsr(msr, value),
    }
}

fn port(random: &mut Random) -> bool {
    let port = random.below(PORTS) as u16;
    let value = random.bits() as u32;
    let write = random.below(2) == 0;
    let width = random.below(3);
    let last = port + (1 << width) - 1;
    let touches = |from: u16, to: u16| port <= to && last >= from;
    // PM1 control, keyboard controller, fast A20 and reset (0x92), COM1.
    let fatal = touches(0x604, 0x605) || touches(0x64, 0x64) || touches(0x92, 0x92);
    if last >= PORTS as u16 || touches(0x3F8, 0x3FF) || (write && fatal) {
        return false;
    }
    // SAFETY: port accesses do not touch this program's memory, and interrupts are off.
    unsafe {
        match (write, width) {
            (true, 0) => asm!("out dx, al", in("dx") port, in("al") value as u8),
            (true, 1) => asm!("out dx, ax", in("dx") port, in("ax") value as u16),
            (true, _) => asm!("out dx, eax", in("dx") port, in("eax") value),
            (false, 0) => asm!("in al, dx", in("dx") port, out("al") _),
            (false, 1) => asm!("in ax, dx", in("dx") port, out("ax") _),
            (false, _) => asm!("in eax, dx", in("dx") port, out("eax") _),
        }
    }
    true
}

/// The HPET's 1 KiB and a little more, aligned or not.
fn device_space(random: &mut Random) {
    let address = HPET + random.below(0x410);
    let value = random.bits();
    // SAFETY: device space, mapped uncached; nothing of this program lives there.
    unsafe {
        match (random.below(2), random.below(4)) {
            (0, 0) => asm!("mov [{}], {}", in(reg) address, in(reg_byte) value as u8),
            (0, 1) => asm!("mov [{}], {:x}", in(reg) address, in(reg) value as u16),
            (0, 2) => asm!("mov [{}], {:e}", in(reg) address, in(reg) value as u32),
            (0, _) => asm!("mov [{}], {}", in(reg) address, in(reg) value),
            (_, 0) => asm!("mov {}, [{}]", out(reg_byte) _, in(reg) address),
            (_, 1) => asm!("mov {:x}, [{}]", out(reg) _, in(reg) address),
            (_, 2) => asm!("mov {:e}, [{}]", out(reg) _, in(reg) address),
            (_, _) => asm!("mov {}, [{}]", out(reg) _, in(reg) address),
        }
    }
}
