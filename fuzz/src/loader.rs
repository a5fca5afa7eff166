//! A kernel image of any bytes: it is refused in one line, or it lies in guest memory, clear of
//! the boot tables, and is entered inside itself.

use std::path::PathBuf;
use std::sync::LazyLock;

use vm_memory::{Bytes, GuestAddress};
use vmm::loader::{self, Boot, Protocol};
use vmm::{boot, layout, memory};

const MEMORY: u64 = 32 << 20;

/// The image under test: a loader takes a path. In memory, one for each process.
static FILE: LazyLock<PathBuf> =
    LazyLock::new(|| format!("/dev/shm/fuzz-loader-{}", std::process::id()).into());

/// Loads the image and, if that worked, hands the machine over to it.
pub fn check(image: &[u8], boot: Boot) {
    std::fs::write(&*FILE, image).expect("/dev/shm takes a file");
    let memory = memory::allocate(MEMORY, Default::default()).expect("32 MiB");
    let kernel = match loader::load_kernel(&memory, &FILE, boot) {
        Ok(kernel) => kernel,
        Err(line) => {
            let line = line.to_string();
            assert!(line.starts_with("--kernel ") && !line.contains('\n'), "{line}");
            return;
        }
    };
    let occupied = &kernel.occupies;
    assert!(occupied.start < occupied.end && occupied.start < MEMORY, "{occupied:x?}");
    assert!(occupied.contains(&kernel.entry), "{:#x} {occupied:x?}", kernel.entry);
    let mut tables = vec![layout::CMDLINE..layout::BOOT_INFO, layout::EBDA..layout::HIGH_MEMORY];
    match kernel.protocol {
        Protocol::Linux64(_) => tables.push(layout::BOOT_PARAMS..layout::PAGE_TABLES + 0x6000),
        Protocol::Linux32(_) => tables.push(layout::BOOT_PARAMS..layout::BOOT_PARAMS + 0x1000),
        Protocol::Pvh | Protocol::Multiboot => {
            tables.push(layout::BOOT_INFO..layout::BOOT_INFO + 0x1000);
        }
    }
    for table in tables {
        let mut bytes = vec![0; (table.end - table.start) as usize];
        memory.read_slice(&mut bytes, GuestAddress(table.start)).expect("low memory");
        // The page between zero page and page tables is nobody's.
        let free = matches!(kernel.protocol, Protocol::Linux64(_)).then_some(0x1000..0x2000);
        let written = |(at, byte): (usize, &u8)| {
            *byte != 0 && !free.as_ref().is_some_and(|free| free.contains(&at))
        };
        assert!(!bytes.iter().enumerate().any(written), "something over {table:x?}");
    }
    if let Ok(line) = loader::cmdline(&kernel, &FILE, Some("")) {
        boot::hand_over(&memory, MEMORY, &kernel, &line, None).expect("boot data fits");
    }
}
