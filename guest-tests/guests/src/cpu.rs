//! One vCPU's private memory: descriptor tables, stacks, and what its handlers record.

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};

/// Bytes per vCPU. A power of two, and every block is aligned to it, so that a handler finds its
/// own block by masking the stack pointer. `guest.ld` aligns the first one.
pub const BLOCK_SIZE: usize = 0x1_0000;
/// Most vCPUs a guest starts.
pub const MAX_CPUS: u32 = 1024;

/// Top of the ring-0 stack (RSP0) within the block.
pub const RING0_STACK_TOP: usize = 0x2000;
/// Top of the NMI stack (IST1) within the block.
pub const NMI_STACK_TOP: usize = 0x3000;
/// Top of the ring-3 stack within the block.
pub const RING3_STACK_TOP: usize = BLOCK_SIZE;

/// The start of a vCPU's block. The boot code fills the tables, handlers fill the rest.
#[repr(C)]
#[derive(Debug)]
pub struct Cpu {
    /// Null, null, ring-0 code 0x10, ring-0 data 0x18, ring-3 data 0x23, ring-3 code 0x2B, TSS 0x30.
    gdt: [u64; 8],
    /// Intel SDM vol. 3, 8.7: 64-bit TSS, 104 bytes.
    pub(crate) tss: [u32; 26],
    /// SDM vol. 1, 19.5.2: a clear bit lets ring 3 use the port. One bit per port up to 0x7FF;
    /// the boot code sets the byte of ones that must follow.
    io_bitmap: [u8; 256],
    pub(crate) io_bitmap_end: u32,
    /// 0 on the BSP; application processors count up in the order in which they arrive.
    pub index: u32,
    /// Set once by the vCPU itself when it reaches ring 3.
    pub apic_id: AtomicU32,
    /// Interrupts taken on the timer vector.
    pub irq_count: AtomicU64,
    /// TSC at the first instruction of the latest timer interrupt.
    pub irq_tsc: AtomicU64,
    /// What the timer handler writes to end an interrupt: 0 = x2APIC MSR 0x80B, else the MMIO EOI.
    pub eoi_address: AtomicU64,
    /// TSC when the vCPU reached ring 3.
    pub arrival_tsc: AtomicU64,
    /// NMIs taken.
    pub nmi_count: AtomicU64,
    /// The vCPU is about to halt and wants an interrupt when its turn comes.
    pub sleeping: AtomicBool,
}

unsafe extern "C" {
    static cpu_blocks: u8;
}

impl Cpu {
    /// The block of the vCPU with this index, below [`MAX_CPUS`]. It is all zero until that vCPU
    /// has come up.
    pub fn at(index: u32) -> &'static Self {
        assert!(index < MAX_CPUS);
        // SAFETY: RAM after the image, reserved for MAX_CPUS blocks by `guest.ld`; zero is a
        // valid block, and what changes in it is atomic or written before the vCPU comes up.
        unsafe { &*(&raw const cpu_blocks).add(index as usize * BLOCK_SIZE).cast() }
    }
}
