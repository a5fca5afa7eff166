//! Tells what memory it was given: the RAM that the memory map promises, whether the last page of
//! RAM below 4 GiB takes a value, and the length and FNV-1a hash of the initial RAM disk.
#![no_std]
#![no_main]

use guests::args::Args;
use guests::console::ResultLine;
use guests::cpu::Cpu;
use guests::guest_main;

guest_main!(main);

// Offsets in the zero page (Linux x86 boot protocol).
const RAMDISK_IMAGE: usize = 0x218;
const RAMDISK_SIZE: usize = 0x21C;
const E820_ENTRIES: usize = 0x1E8;
const E820_TABLE: usize = 0x2D0;
const E820_RAM: u32 = 1;
/// End of what the page tables of the guest map.
const MAPPED: u64 = 1 << 32;

fn main(args: &Args, _cpu: &'static Cpu) {
    let page = args.zero_page();
    let u32_at =
        |at: usize| u32::from_le_bytes([page[at], page[at + 1], page[at + 2], page[at + 3]]);
    let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
    let (mut ram, mut low_end) = (0, 0);
    for entry in 0..usize::from(page[E820_ENTRIES]) {
        let at = E820_TABLE + entry * 20;
        let (start, length) = (u64_at(at), u64_at(at + 8));
        if u32_at(at + 16) == E820_RAM {
            ram += length;
            if start + length <= MAPPED {
                low_end = low_end.max(start + length);
            }
        }
    }
    let (start, length) = (u32_at(RAMDISK_IMAGE), u32_at(RAMDISK_SIZE));
    let hash = (0..length).fold(0xcbf2_9ce4_8422_2325_u64, |hash, offset| {
        // SAFETY: within the RAM disk, which lies in mapped memory.
        let byte = unsafe { ((start + offset) as usize as *const u8).read() };
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    // Only now: the RAM disk may end there.
    let last = (low_end - 8) as *mut u64;
    // SAFETY: the last word of RAM, by the map; this program and its stacks lie in the first 2 MiB.
    let kept = unsafe {
        last.write_volatile(low_end);
        last.read_volatile() == low_end
    };
    ResultLine::new("memory")
        .number("ram", ram)
        .number("low_end", low_end)
        .number("last_page_kept", kept)
        .number("initrd_at", start)
        .number("initrd_bytes", length)
        .number("initrd_fnv1a", hash)
        .end();
}
