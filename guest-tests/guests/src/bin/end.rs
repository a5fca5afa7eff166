//! Ends in the way that `how` names, for tests of the VMM's exit status: `power-off`, `reboot`,
//! `triple-fault`, `emulation-failure`; or does not end: `halt`, `spin`.
#![no_std]
#![no_main]

use core::arch::global_asm;

use guests::args::Args;
use guests::console::ResultLine;
use guests::cpu::Cpu;
use guests::{guest_main, power, ring0};

guest_main!(main);

unsafe extern "C" {
    fn r0_triple_fault();
    fn r0_run_device_space();
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
);

fn main(args: &Args, _cpu: &'static Cpu) {
    let how = args.text("how").unwrap_or("power-off");
    ResultLine::new("end").text("how", how).end();
    match how {
        "power-off" => power::off(),
        "reboot" => power::reboot(),
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
