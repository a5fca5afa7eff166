//! A 64-bit ELF kernel (vmlinux, or a bare-metal guest), entered like Linux:
//! 64-bit mode, identity map, RSI at the zero page.

use super::Kernel;
use crate::layout::HIGH_MEMORY;
use crate::memory::{self, GuestMemory};
use linux_loader::loader::bootparam::setup_header;
use linux_loader::loader::{Elf, KernelLoader};
use std::fs::File;
use vm_memory::GuestAddress;

/// Limit of Linux's own command line buffer on x86 (COMMAND_LINE_SIZE).
const CMDLINE_MAX: usize = 2047;

pub(super) fn load(memory: &GuestMemory, file: &mut File) -> Result<Kernel, String> {
    let loaded = Elf::load(memory, None, file, Some(GuestAddress(HIGH_MEMORY)))
        .map_err(|e| format!("cannot be loaded ({e}); is --memory large enough?"))?;
    let (entry, end) = (loaded.kernel_load.0, loaded.kernel_end);
    let low_end = memory::low_end(memory);
    if !(HIGH_MEMORY..end).contains(&entry) || end > low_end {
        return Err(format!(
            "enters at {entry:#x} and ends at {end:#x}, outside the memory from {HIGH_MEMORY:#x} \
             to {low_end:#x}"
        ));
    }
    let header = setup_header { header: 0x5372_6448, version: 0x020f, ..Default::default() };
    Ok(Kernel {
        entry,
        header,
        occupies: HIGH_MEMORY..end,
        initrd_max: 0x7fff_ffff,
        cmdline_max: CMDLINE_MAX,
    })
}
