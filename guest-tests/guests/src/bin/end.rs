//! Ends in the way that `how` names, for tests of the VMM's exit status: `power-off`, `reboot`
//! (keyboard controller), `reset` (ACPI), `panic`, `triple-fault`, `emulation-failure`; or does not
//! end: `halt`, `spin`. Before that it brings up `cpus` vCPUs (those named, else only itself) and
//! sends `talk` bytes (0) to the console.
#![no_std]
#![no_main]

use core::arch::global_asm;

use guests::args::Args;
use guests::console::{self, ResultLine};
use guests::cpu::Cpu;
use guests::{guest_main, port, power, ring0, smp};

guest_main!(main);

/// The pvpanic event port; bit 0 says that the kernel panicked.
const PVPANIC: u16 = 0x505;

unsafe extern "C" {
    fn r0_triple_fault();
    fn r0_run_device_space();
    fn r0_acpi_reset();
}

global_asm!(
    ".text",
    // With an empty IDT, the first exception cannot be delivered, nor can what follows from it.
    ".global r0_triple_fault",
    "r0_triple_fault:",
    "  push 0",
    "  push 0",
    "  lidt [rsp]",
    "  ud2",
    // Code in device space: nothing that KVM could run or emulate.
    ".global r0_run_device_space",
    "r0_run_device_space:",
    "  mov eax, 0xFED00000",
    "  jmp rax",
    // The reset register that the FADT names, which the TSS does not open to ring 3.
    ".global r0_acpi_reset",
    "r0_acpi_reset:",
    "  mov dx, 0xCF9",
    "  mov al, 6",
    "  out dx, al",
    "  hlt",
);

fn main(args: &Args, cpu: &'static Cpu) {
    let how = args.text("how").unwrap_or("power-off");
    if args.text("cpus").is_some() {
        smp::start(args, cpu, |_| ());
    }
    ResultLine::new("end").text("how", how).end();
    for count in 0..args.number("talk", 0) {
        console::send(if count % 64 == 63 { b'\n' } else { b'.' });
    }
    match how {
        "power-off" => power::off(),
        "reboot" => power::reboot(),
        "reset" => stop(r0_acpi_reset),
        "panic" => {
            port::out8(PVPANIC, 1);
            ring0::halt_forever()
        }
        "halt" => ring0::halt_forever(),
        "spin" => loop {
            core::hint::spin_loop();
        },
        "triple-fault" => stop(r0_triple_fault),
        "emulation-failure" => stop(r0_run_device_space),
        other => panic!("how={other}"),
    }
}

fn stop(routine: unsafe extern "C" fn()) -> ! {
    // SAFETY: takes no arguments and does not come back.
    unsafe { ring0::call(routine, [0; 3]) };
    panic!("still running")
}
