//! What a kernel is told of the machine, by the protocol that it is entered by.

use crate::boot_params::{self, e820};
use crate::error::{Error, Result};
use crate::layout::{ACPI_TABLES, BOOT_INFO, BOOT_PARAMS, CMDLINE};
use crate::loader::{Kernel, Protocol};
use crate::memory::GuestMemory;
use crate::registers::{self, Entry};
use linux_loader::loader::start_info::{hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info};
use vm_memory::{ByteValued, Bytes, GuestAddress, GuestMemoryError};

/// An initrd or module: guest-physical address and bytes.
pub type Module = (u64, u64);

/// Writes command line, boot information and CPU tables; returns how the boot
/// vCPU starts.
///
/// # Errors
/// Boot data that does not fit where it belongs.
pub fn hand_over(
    memory: &GuestMemory,
    memory_bytes: u64,
    kernel: &Kernel,
    cmdline: &str,
    module: Option<Module>,
) -> Result<Entry> {
    let failed = |e: &dyn std::fmt::Display| Error::new(format!("cannot write boot data ({e})"));
    let mut line = cmdline.as_bytes().to_vec();
    line.push(0);
    memory.write_slice(&line, GuestAddress(CMDLINE)).map_err(|e| failed(&e))?;
    // What enters in 32-bit mode was loaded below 4 GiB.
    let eip = kernel.entry as u32;
    let entry = match &kernel.protocol {
        Protocol::Linux64(header) => {
            boot_params::write(memory, memory_bytes, *header, module)?;
            Entry::Long64 { rip: kernel.entry, rsi: BOOT_PARAMS }
        }
        Protocol::Linux32(header) => {
            boot_params::write(memory, memory_bytes, *header, module)?;
            Entry::Protected32 { eip, eax: 0, ebx: 0, esi: BOOT_PARAMS as u32 }
        }
        Protocol::Pvh => {
            write_start_info(memory, memory_bytes, module).map_err(|e| failed(&e))?;
            Entry::Protected32 { eip, eax: 0, ebx: BOOT_INFO as u32, esi: 0 }
        }
        Protocol::Multiboot => {
            write_multiboot(memory, memory_bytes, module).map_err(|e| failed(&e))?;
            Entry::Protected32 { eip, eax: MULTIBOOT_MAGIC, ebx: BOOT_INFO as u32, esi: 0 }
        }
    };
    registers::write_tables(memory, entry).map_err(|e| failed(&e))?;
    Ok(entry)
}

/// Writes one thing after another, each at a multiple of 8.
struct Page<'a> {
    memory: &'a GuestMemory,
    next: u64,
}

impl Page<'_> {
    fn put(&mut self, bytes: &[u8]) -> std::result::Result<u64, GuestMemoryError> {
        let at = self.next;
        self.memory.write_slice(bytes, GuestAddress(at))?;
        self.next = (at + bytes.len() as u64).next_multiple_of(8);
        Ok(at)
    }
}

/// Xen's `hvm_start_info` version 1 at [`BOOT_INFO`] (xen/public/arch-x86/hvm/start_info.h).
fn write_start_info(
    memory: &GuestMemory,
    memory_bytes: u64,
    module: Option<Module>,
) -> std::result::Result<(), GuestMemoryError> {
    const MAGIC: u32 = 0x336e_c578;
    let mut page = Page { memory, next: BOOT_INFO + size_of::<hvm_start_info>() as u64 };
    let mut info = hvm_start_info {
        magic: MAGIC,
        version: 1,
        cmdline_paddr: CMDLINE,
        rsdp_paddr: ACPI_TABLES,
        ..Default::default()
    };
    if let Some((paddr, size)) = module {
        let entry = hvm_modlist_entry { paddr, size, ..Default::default() };
        info.nr_modules = 1;
        info.modlist_paddr = page.put(entry.as_slice())?;
    }
    let map: Vec<u8> = e820(memory_bytes)
        .into_iter()
        .inspect(|_| info.memmap_entries += 1)
        .flat_map(|(addr, size, type_)| {
            let entry = hvm_memmap_table_entry { addr, size, type_, ..Default::default() };
            entry.as_slice().to_vec()
        })
        .collect();
    info.memmap_paddr = page.put(&map)?;
    memory.write_obj(info, GuestAddress(BOOT_INFO))
}

/// What a Multiboot kernel finds in EAX.
const MULTIBOOT_MAGIC: u32 = 0x2bad_b002;

/// Multiboot 0.6.96 §3.3 at [`BOOT_INFO`]: memory sizes, command line, at most
/// one module, memory map, our name.
fn write_multiboot(
    memory: &GuestMemory,
    memory_bytes: u64,
    module: Option<Module>,
) -> std::result::Result<(), GuestMemoryError> {
    const MEMORY: u32 = 1;
    const CMDLINE_GIVEN: u32 = 1 << 2;
    const MODULES: u32 = 1 << 3;
    const MEMORY_MAP: u32 = 1 << 6;
    const LOADER_NAME: u32 = 1 << 9;
    const WORDS: usize = 22;
    let map = e820(memory_bytes);
    let kib_from = |start: u64| {
        let length = map.iter().find(|entry| entry.0 == start).map_or(0, |entry| entry.1);
        u32::try_from(length >> 10).unwrap_or(u32::MAX)
    };
    let mut page = Page { memory, next: BOOT_INFO + 4 * WORDS as u64 };
    let mut info = [0u32; WORDS];
    info[0] = MEMORY | CMDLINE_GIVEN | MEMORY_MAP | LOADER_NAME;
    (info[1], info[2]) = (kib_from(0), kib_from(crate::layout::HIGH_MEMORY));
    info[4] = CMDLINE as u32;
    if let Some((start, size)) = module {
        let entry = words(&[start as u32, (start + size) as u32, CMDLINE as u32, 0]);
        info[0] |= MODULES;
        (info[5], info[6]) = (1, page.put(&entry)? as u32);
    }
    let entries: Vec<u8> = map
        .iter()
        .flat_map(|(start, length, kind)| {
            // The size field does not count itself.
            let mut entry = 20u32.to_le_bytes().to_vec();
            entry.extend(start.to_le_bytes());
            entry.extend(length.to_le_bytes());
            entry.extend(kind.to_le_bytes());
            entry
        })
        .collect();
    (info[11], info[12]) = (entries.len() as u32, page.put(&entries)? as u32);
    info[16] = page.put(b"vmm\0")? as u32;
    memory.write_slice(&words(&info), GuestAddress(BOOT_INFO))
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{EBDA, HIGH_MEMORY};
    use vm_memory::Address;

    fn memory() -> (GuestMemory, u64) {
        let bytes = 64 << 20;
        (crate::memory::allocate(bytes, Default::default()).unwrap(), bytes)
    }

    fn kernel(protocol: Protocol) -> Kernel {
        Kernel { entry: 0x40_0000, protocol, occupies: 0..0, initrd_max: 0, cmdline_max: 100 }
    }

    #[test]
    fn multiboot_information_tells_of_memory_command_line_and_module() {
        let (memory, bytes) = memory();
        let kernel = kernel(Protocol::Multiboot);
        let module = Some((0x100_0000, 0x345));
        let entry = hand_over(&memory, bytes, &kernel, "test.flat a", module).unwrap();
        let info = BOOT_INFO as u32;
        let wanted = Entry::Protected32 { eip: 0x40_0000, eax: 0x2bad_b002, ebx: info, esi: 0 };
        assert_eq!(entry, wanted);
        let word = |at: u64| memory.read_obj::<u32>(GuestAddress(at)).unwrap();
        assert_eq!(word(BOOT_INFO), 0x24d);
        assert_eq!(word(BOOT_INFO + 4), (EBDA >> 10) as u32);
        assert_eq!(word(BOOT_INFO + 8), ((bytes - HIGH_MEMORY) >> 10) as u32);
        let mut text = [0; 12];
        memory.read_slice(&mut text, GuestAddress(word(BOOT_INFO + 16).into())).unwrap();
        assert_eq!(&text, b"test.flat a\0");
        assert_eq!(word(BOOT_INFO + 20), 1);
        let list = u64::from(word(BOOT_INFO + 24));
        assert_eq!((word(list), word(list + 4)), (0x100_0000, 0x100_0345));
        let (length, map) = (word(BOOT_INFO + 44), u64::from(word(BOOT_INFO + 48)));
        assert_eq!(length as usize, 24 * e820(bytes).len());
        assert_eq!(word(map), 20);
    }

    #[test]
    fn start_info_tells_of_tables_map_and_module() {
        let (memory, bytes) = memory();
        let entry =
            hand_over(&memory, bytes, &kernel(Protocol::Pvh), "quiet", Some((4096, 5))).unwrap();
        assert!(matches!(entry, Entry::Protected32 { eax: 0, ebx, .. } if ebx == BOOT_INFO as u32));
        let info: hvm_start_info = memory.read_obj(GuestAddress(BOOT_INFO)).unwrap();
        assert_eq!((info.magic, info.version, info.nr_modules), (0x336e_c578, 1, 1));
        assert_eq!((info.cmdline_paddr, info.rsdp_paddr), (CMDLINE, ACPI_TABLES));
        let module: hvm_modlist_entry = memory.read_obj(GuestAddress(info.modlist_paddr)).unwrap();
        assert_eq!((module.paddr, module.size), (4096, 5));
        let map = e820(bytes);
        assert_eq!(info.memmap_entries as usize, map.len());
        let last = GuestAddress(info.memmap_paddr).unchecked_add(24 * (map.len() as u64 - 1));
        let last: hvm_memmap_table_entry = memory.read_obj(last).unwrap();
        assert_eq!((last.addr, last.size, last.type_), *map.last().unwrap());
    }
}
