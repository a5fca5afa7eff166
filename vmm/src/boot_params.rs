//! The zero page of the Linux boot protocol, and the memory map in it.

use crate::error::{Error, Result};
use crate::layout::{ACPI_TABLES, BOOT_PARAMS, CMDLINE, EBDA, HIGH_MEMORY};
use crate::memory::{self, GuestMemory};
use linux_loader::configurator::linux::LinuxBootConfigurator;
use linux_loader::configurator::{BootConfigurator, BootParams};
use linux_loader::loader::bootparam::{boot_e820_entry, boot_params, setup_header};
use vm_memory::GuestAddress;

const E820_RAM: u32 = 1;
const E820_RESERVED: u32 = 2;
/// `type_of_loader` of a boot loader without a number of its own.
const LOADER_UNDEFINED: u8 = 0xff;

/// The memory map: (start, length, type).
pub fn e820(memory_bytes: u64) -> Vec<(u64, u64, u32)> {
    let mut map = vec![
        (0, EBDA, E820_RAM),
        (EBDA, 0xa_0000 - EBDA, E820_RESERVED),
        (ACPI_TABLES, HIGH_MEMORY - ACPI_TABLES, E820_RESERVED),
    ];
    for (start, length) in memory::ranges(memory_bytes) {
        let skip = if start == 0 { HIGH_MEMORY } else { 0 };
        map.push((start + skip, length - skip, E820_RAM));
    }
    map
}

/// Writes the zero page for a kernel with this setup header.
pub fn write(
    memory: &GuestMemory,
    memory_bytes: u64,
    header: setup_header,
    initrd: Option<(u64, u64)>,
) -> Result<()> {
    let mut params = boot_params { hdr: header, ..Default::default() };
    params.hdr.type_of_loader = LOADER_UNDEFINED;
    params.hdr.cmd_line_ptr = CMDLINE as u32;
    params.acpi_rsdp_addr = ACPI_TABLES;
    if let Some((address, size)) = initrd {
        params.hdr.ramdisk_image = address as u32;
        params.ext_ramdisk_image = (address >> 32) as u32;
        params.hdr.ramdisk_size = size as u32;
        params.ext_ramdisk_size = (size >> 32) as u32;
    }
    let map = e820(memory_bytes);
    params.e820_entries = map.len() as u8;
    for (entry, (addr, size, r#type)) in params.e820_table.iter_mut().zip(map) {
        *entry = boot_e820_entry { addr, size, r#type };
    }
    LinuxBootConfigurator::write_bootparams(
        &BootParams::new(&params, GuestAddress(BOOT_PARAMS)),
        memory,
    )
    .map_err(|e| Error::new(format!("cannot write boot data ({e})")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_map_tells_of_every_byte_once() {
        for bytes in [64 << 20, (3 << 30) - 4096, 3 << 30, 5 << 30] {
            let mut map = e820(bytes);
            map.sort();
            for pair in map.windows(2) {
                assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{map:x?}");
            }
            let ram: u64 = map.iter().filter(|e| e.2 == E820_RAM).map(|e| e.1).sum();
            // All but the space between the EBDA and 1 MiB.
            assert_eq!(ram, bytes - (HIGH_MEMORY - EBDA));
        }
    }
}
