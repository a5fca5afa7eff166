//! Privileged routines, callable from ring 3 through the gate.

use core::arch::{asm, global_asm};

unsafe extern "C" {
    fn r0_rdmsr();
    fn r0_wrmsr();
    fn r0_halt_forever();
    fn r0_wait_irq();
    fn r0_enable_interrupts();
}

global_asm!(
    ".text",
    // (msr) -> rax value, rdx fault
    ".global r0_rdmsr",
    "r0_rdmsr:",
    "  mov ecx, edi",
    ".global rdmsr_instruction",
    "rdmsr_instruction:",
    "  rdmsr",
    "  shl rdx, 32",
    "  or rax, rdx",
    "  xor edx, edx",
    "  ret",
    // (msr, value) -> rdx fault
    ".global r0_wrmsr",
    "r0_wrmsr:",
    "  mov ecx, edi",
    "  mov eax, esi",
    "  mov rdx, rsi",
    "  shr rdx, 32",
    ".global wrmsr_instruction",
    "wrmsr_instruction:",
    "  wrmsr",
    "  xor edx, edx",
    "  ret",
    ".global msr_fault",
    "msr_fault:",
    "  xor eax, eax",
    "  mov edx, 1",
    "  ret",
    ".global r0_halt_forever",
    "r0_halt_forever:",
    "  cli",
    "1:",
    "  hlt",
    "  jmp 1b",
    // Sets IF in the frame that the gate returns through: return address, RIP, CS, RFLAGS.
    ".global r0_enable_interrupts",
    "r0_enable_interrupts:",
    "  or qword ptr [rsp + 24], 0x200",
    "  ret",
    // (address of a count, value seen): sleeps until the count moves. STI's shadow covers HLT, so
    // the interrupt cannot slip in between.
    ".global r0_wait_irq",
    "r0_wait_irq:",
    "  cli",
    "  cmp [rdi], rsi",
    "  jne 1f",
    "  sti",
    "  hlt",
    "  jmp r0_wait_irq",
    "1:",
    "  ret",
);

/// Calls a ring-0 routine with up to three arguments; returns RAX and RDX.
///
/// # Safety
/// `routine` must be an assembly routine of the guest that follows the SysV convention, and the
/// arguments must be what it expects.
pub unsafe fn call(routine: unsafe extern "C" fn(), arguments: [u64; 3]) -> (u64, u64) {
    let (rax, rdx);
    // SAFETY: the gate runs `routine` on this vCPU's ring-0 stack and comes back; the caller
    // vouches for the routine, and the clobbers are the convention's.
    unsafe {
        asm!(
            "int3",
            inlateout("rax") routine as usize as u64 => rax,
            in("rdi") arguments[0],
            in("rsi") arguments[1],
            inlateout("rdx") arguments[2] => rdx,
            clobber_abi("sysv64"),
        );
    }
    (rax, rdx)
}

/// The MSR's value; `None` if the read raises #GP.
pub fn rdmsr(msr: u32) -> Option<u64> {
    // SAFETY: the routine takes an MSR number, and its fault is caught.
    let (value, fault) = unsafe { call(r0_rdmsr, [msr.into(), 0, 0]) };
    (fault == 0).then_some(value)
}

/// Writes the MSR; `None` if that raises #GP.
pub fn wrmsr(msr: u32, value: u64) -> Option<()> {
    // SAFETY: the routine takes an MSR number and a value, and its fault is caught. Which MSRs
    // keep the guest alive is the guest's business.
    let (_, fault) = unsafe { call(r0_wrmsr, [msr.into(), value, 0]) };
    (fault == 0).then_some(())
}

/// HLT with interrupts off, for good.
pub fn halt_forever() -> ! {
    // SAFETY: does not come back; no arguments.
    unsafe { call(r0_halt_forever, [0; 3]) };
    loop {
        core::hint::spin_loop();
    }
}

/// Sleeps until `count` is no longer `seen`.
pub fn wait_irq(count: &core::sync::atomic::AtomicU64, seen: u64) {
    // SAFETY: the routine only reads the count.
    unsafe { call(r0_wait_irq, [count.as_ptr() as u64, seen, 0]) };
}

/// Lets interrupts reach ring 3 from now on.
pub fn enable_interrupts() {
    // SAFETY: changes the caller's flags only; every vector in use has a handler.
    unsafe { call(r0_enable_interrupts, [0; 3]) };
}
