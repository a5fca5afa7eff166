//! From the VMM's 64-bit entry (or a SIPI) to Rust in ring 3, and the one gate back.
//!
//! Ring 0 is assembly and stays small: some hosts interpret it, instruction by instruction, and
//! lack everything that a compiler likes. All memory is mapped for the user, so whatever needs no
//! privilege (tables, APIC MMIO, HPET) is done by Rust in ring 3. Ports are opened by the TSS's
//! bitmap and the gate is a breakpoint: the same hosts ignore IOPL on IRET, do not change the
//! privilege level on SYSCALL, and raise #UD for INT n.

use core::arch::global_asm;
use core::mem::offset_of;

use crate::cpu::{BLOCK_SIZE, Cpu, NMI_STACK_TOP, RING0_STACK_TOP, RING3_STACK_TOP};

/// Where application processors start: SIPI vector 0x60, page 0x60000.
pub const TRAMPOLINE: u64 = 0x6_0000;
/// Vector of INT3, through which ring 3 calls ring-0 routines.
pub const CALL_VECTOR: u8 = 3;
/// Vector of the timer under test.
pub const TIMER_VECTOR: u8 = 0x40;

// --- Page tables: the first 4 GiB as 2 MiB user pages, device space from 0xFE000000 uncached.
global_asm!(
    ".section .tables, \"aw\"",
    ".balign 4096",
    ".global page_table_root",
    "page_table_root:",
    "  .quad page_directory_pointers + 7",
    "  .fill 511, 8, 0",
    "page_directory_pointers:",
    "  .quad page_directories + 0x0007, page_directories + 0x1007",
    "  .quad page_directories + 0x2007, page_directories + 0x3007",
    "  .fill 508, 8, 0",
    "page_directories:",
    "  .set page, 0",
    "  .rept 2032",
    "  .quad page + 0x87", // PS | US | RW | P
    "  .set page, page + 0x200000",
    "  .endr",
    "  .rept 16",
    "  .quad page + 0x9F", // and PCD | PWT
    "  .set page, page + 0x200000",
    "  .endr",
    // Enough for the BSP's entry and the trampoline's jump into long mode.
    "boot_gdt:",
    "  .quad 0, 0, 0x00AF9B000000FFFF, 0x00CF93000000FFFF",
    "boot_gdt_end:",
    "ap_next: .long 1",
    // Rust's own sections follow.
    ".section .bss",
    ".balign 4096",
    ".global interrupt_table",
    "interrupt_table: .skip 4096",
);

// --- Entry of the BSP, and what it shares with the application processors.
global_asm!(
    ".text",
    ".global _start",
    "_start:",
    "  cli",
    "  mov r12, rsi",
    "  lea rbx, [rip + cpu_blocks]",
    "  lea r13, [rip + bsp_entry]",
    "  mov rax, cr4",
    "  or rax, 0x620", // PAE | OSFXSR | OSXMMEXCPT: the compiler uses SSE
    "  mov cr4, rax",
    "  mov eax, 0x80000033", // PG | NE | ET | MP | PE
    "  mov cr0, rax",
    "  lea rax, [rip + page_table_root]",
    "  mov cr3, rax",
    "  xor eax, eax",
    // rbx: block, eax: index, r12: second argument, r13: Rust entry.
    "start_cpu:",
    "  mov [rbx + {index}], eax",
    "  lea rsp, [rbx + {ring0_top}]",
    "  mov qword ptr [rbx], 0",
    "  mov qword ptr [rbx + 0x08], 0",
    "  movabs rax, 0x00AF9B000000FFFF",
    "  mov [rbx + 0x10], rax",
    "  movabs rax, 0x00CF93000000FFFF",
    "  mov [rbx + 0x18], rax",
    "  movabs rax, 0x00CFF3000000FFFF",
    "  mov [rbx + 0x20], rax",
    "  movabs rax, 0x00AFFB000000FFFF",
    "  mov [rbx + 0x28], rax",
    // TSS descriptor, SDM vol. 3, 8.2.3: base 23:0 at bit 16, base 31:24 at bit 56.
    "  lea rax, [rbx + {tss}]",
    "  mov rcx, rax",
    "  and eax, 0x00FFFFFF",
    "  shl rax, 16",
    "  shr ecx, 24",
    "  shl rcx, 56",
    "  or rax, rcx",
    "  movabs rcx, 0x0000890000000168", // limit: TSS, bitmap, and its last byte
    "  or rax, rcx",
    "  mov [rbx + 0x30], rax",
    "  mov qword ptr [rbx + 0x38], 0",
    "  lea rax, [rbx + {ring0_top}]",
    "  mov [rbx + {tss} + 0x04], rax",
    "  lea rax, [rbx + {nmi_top}]",
    "  mov [rbx + {tss} + 0x24], rax",
    "  mov dword ptr [rbx + {tss} + 0x64], 0x680000", // the I/O bitmap follows the TSS
    "  mov dword ptr [rbx + {bitmap_end}], 0xFF",
    "  push rbx",
    "  sub rsp, 2",
    "  mov word ptr [rsp], 0x3F",
    "  lgdt [rsp]",
    "  lea rax, [rip + interrupt_table]",
    "  mov [rsp + 2], rax",
    "  mov word ptr [rsp], 0xFFF",
    "  lidt [rsp]",
    "  lea rsp, [rbx + {ring0_top}]",
    "  mov eax, 0x30",
    "  ltr ax",
    "  xor eax, eax",
    "  mov fs, eax",
    "  mov gs, eax",
    "  mov eax, 0x23",
    "  mov ds, eax",
    "  mov es, eax",
    "  mov rdi, rbx",
    "  mov rsi, r12",
    "  push 0x23",
    "  lea rax, [rbx + {ring3_top} - 8]",
    "  push rax",
    "  push 2", // interrupts off
    "  push 0x2B",
    "  push r13",
    "  iretq",
    index = const offset_of!(Cpu, index),
    tss = const offset_of!(Cpu, tss),
    bitmap_end = const offset_of!(Cpu, io_bitmap_end),
    ring0_top = const RING0_STACK_TOP,
    nmi_top = const NMI_STACK_TOP,
    ring3_top = const RING3_STACK_TOP,
);

// --- Application processors: real mode straight to long mode, then the common path.
global_asm!(
    ".section .rodata",
    ".code16",
    ".global trampoline_start",
    "trampoline_start:",
    "  cli",
    "  mov ax, cs",
    "  mov ds, ax",
    "  .byte 0x66, 0x0F, 0x01, 0x16", // lgdtl [trampoline_gdtr - trampoline_start]
    "  .word trampoline_gdtr - trampoline_start",
    "  mov eax, offset page_table_root",
    "  mov cr3, eax",
    "  mov eax, 0x620",
    "  mov cr4, eax",
    "  mov ecx, 0xC0000080",
    "  rdmsr",
    "  or eax, 0x100", // EFER.LME
    "  wrmsr",
    "  mov eax, 0x80000033",
    "  mov cr0, eax",
    "  .byte 0x66, 0xEA", // ljmp 0x10:ap_long with a 32-bit offset
    "  .long ap_long",
    "  .word 0x10",
    "trampoline_gdtr:",
    "  .word boot_gdt_end - boot_gdt - 1",
    "  .long boot_gdt",
    ".global trampoline_end",
    "trampoline_end:",
    ".code64",
    ".text",
    "ap_long:",
    "  mov eax, 0x18",
    "  mov ss, eax",
    "  mov ds, eax",
    "  mov es, eax",
    "  mov eax, 1",
    "  lock xadd [ap_next], eax",
    "  mov ebx, eax",
    "  imul rbx, rbx, {block}",
    "  lea rcx, [rip + cpu_blocks]",
    "  add rbx, rcx",
    "  lea r13, [rip + ap_entry]",
    "  jmp start_cpu",
    block = const BLOCK_SIZE,
);

// --- The gate: ring 3 executes INT3 with a routine in RAX and SysV arguments.
global_asm!(".text", ".global call_gate", "call_gate:", "  call rax", "  iretq",);

// --- Exceptions: a #GP of the two probed MSR instructions is an answer, the rest goes to Rust.
global_asm!(
    ".text",
    ".global exception_stubs",
    ".balign 16",
    "exception_stubs:",
    ".set vector, 0",
    ".rept 32",
    "  .balign 16",
    // Only these push an error code: SDM vol. 3, 6.13.
    "  .if ((1 << vector) & 0x60227D00) == 0",
    "  push 0",
    "  .endif",
    "  push vector",
    "  jmp exception",
    "  .set vector, vector + 1",
    ".endr",
    "exception:",
    "  push rax",
    "  mov rax, [rsp + 24]",
    "  cmp rax, offset rdmsr_instruction",
    "  je 1f",
    "  cmp rax, offset wrmsr_instruction",
    "  je 1f",
    "  mov rdi, [rsp + 8]",
    "  mov rsi, [rsp + 16]",
    "  mov rdx, [rsp + 24]",
    "  mov rcx, cr2",
    // Never returns to the fault: a fresh ring-3 stack will do.
    "  mov rax, rsp",
    "  and rax, -{block}",
    "  add rax, {ring3_top} - 8",
    "  mov [rsp + 48], rax",
    "  mov qword ptr [rsp + 24], offset fault_entry",
    "  mov qword ptr [rsp + 32], 0x2B",
    "  mov qword ptr [rsp + 40], 2",
    "  mov qword ptr [rsp + 56], 0x23",
    "  add rsp, 24",
    "  iretq",
    "1:",
    "  mov qword ptr [rsp + 24], offset msr_fault",
    "  pop rax",
    "  add rsp, 16",
    "  iretq",
    block = const BLOCK_SIZE,
    ring3_top = const RING3_STACK_TOP,
);

// --- Timer interrupt: the first thing it does is read the TSC.
global_asm!(
    ".text",
    ".global timer_stub",
    "timer_stub:",
    "  push rax",
    "  push rdx",
    "  push rcx",
    "  rdtsc",
    "  shl rdx, 32",
    "  or rax, rdx",
    "  mov rcx, rsp",
    "  and rcx, -{block}",
    "  mov [rcx + {irq_tsc}], rax",
    "  inc qword ptr [rcx + {irq_count}]",
    "  mov rcx, [rcx + {eoi}]",
    "  xor eax, eax",
    "  test rcx, rcx",
    "  jz 1f",
    "  mov [rcx], eax",
    "  jmp 2f",
    "1:",
    "  xor edx, edx",
    "  mov ecx, 0x80B",
    "  wrmsr",
    "2:",
    "  pop rcx",
    "  pop rdx",
    "  pop rax",
    "  iretq",
    block = const BLOCK_SIZE,
    irq_tsc = const offset_of!(Cpu, irq_tsc),
    irq_count = const offset_of!(Cpu, irq_count),
    eoi = const offset_of!(Cpu, eoi_address),
);

// --- NMI: counted. A guest that does more in it replaces the vector.
global_asm!(
    ".text",
    ".global nmi_stub",
    "nmi_stub:",
    "  push rcx",
    "  mov rcx, rsp",
    "  and rcx, -{block}",
    "  inc qword ptr [rcx + {nmi_count}]",
    "  pop rcx",
    "  iretq",
    block = const BLOCK_SIZE,
    nmi_count = const offset_of!(Cpu, nmi_count),
);
