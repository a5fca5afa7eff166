//! Guest RAM: one range below the device hole, one above it.

use crate::cli::HugePages;
use crate::error::{Error, Result};
use crate::layout::{HIGH_MEMORY, HOLE_END, HOLE_START};
use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use std::io;
use std::path::Path;
use std::ptr;
use vm_memory::mmap::MmapRegionError;
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap, MmapRegion};

/// Guest memory as everybody here shares it.
pub type GuestMemory = vm_memory::GuestMemoryMmap<()>;

/// The least memory that holds the boot structures and a small guest.
pub const MIN_BYTES: u64 = 4 << 20;

/// The RAM ranges (start, length) of a guest with `bytes` of memory.
pub fn ranges(bytes: u64) -> Vec<(u64, u64)> {
    let low = bytes.min(HOLE_START);
    let high = bytes - low;
    let mut ranges = vec![(0, low)];
    if high > 0 {
        ranges.push((HOLE_END, high));
    }
    ranges
}

/// How the host is to hold the guest's memory.
#[derive(Debug, Clone, Copy, Default)]
pub struct Backing {
    /// On huge pages of this size, all of them found before the start.
    pub huge_pages: Option<HugePages>,
    /// Touched before the start.
    pub prefault: bool,
    /// Never paged out.
    pub lock: bool,
}

/// Maps `bytes` of zeroed anonymous memory for the guest.
///
/// # Errors
/// Sizes below [`MIN_BYTES`], sizes that are no whole number of pages, or what the
/// host cannot map, find or lock.
pub fn allocate(bytes: u64, backing: Backing) -> Result<GuestMemory> {
    if bytes < MIN_BYTES {
        return Err(Error::new(format!(
            "--memory: {bytes} bytes is too little, the least is {} MiB",
            MIN_BYTES >> 20
        )));
    }
    let page = backing.huge_pages.map_or(4096, HugePages::bytes);
    if !bytes.is_multiple_of(page) {
        return Err(Error::new(match backing.huge_pages {
            None => format!("--memory: {bytes} bytes is not a whole number of pages"),
            Some(size) => format!(
                "--memory: {bytes} bytes is not a whole number of huge pages of {size} \
                 (--hugepages)"
            ),
        }));
    }
    let mut regions = Vec::new();
    for (start, length) in ranges(bytes) {
        let region = map(length as usize, backing).map_err(|e| no_memory(bytes, backing, &e))?;
        hold(&region, backing)?;
        // None only where the address and the length wrap, which no size does that
        // could be mapped.
        regions.extend(GuestRegionMmap::new(region, GuestAddress(start)));
    }
    GuestMemory::from_regions(regions)
        .map_err(|e| Error::new(format!("--memory: the ranges do not fit together ({e})")))
}

/// Small pages are taken from the host as the guest touches them. Huge pages are
/// reserved by the mapping itself: where they are too few it fails.
fn map(length: usize, backing: Backing) -> std::result::Result<MmapRegion, MmapRegionError> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let flags = flags
        | match backing.huge_pages {
            None => libc::MAP_NORESERVE,
            Some(HugePages::TwoMib) => libc::MAP_HUGETLB | libc::MAP_HUGE_2MB,
            Some(HugePages::OneGib) => libc::MAP_HUGETLB | libc::MAP_HUGE_1GB,
        };
    let build = || MmapRegion::build(None, length, libc::PROT_READ | libc::PROT_WRITE, flags);
    if backing.huge_pages.is_some() {
        return build();
    }
    let spacer = Spacer::above(length);
    let region = build();
    drop(spacer);
    region
}

/// Size of the pages that the host merges small ones to, and KVM maps at once.
const LARGE_PAGE: usize = 2 << 20;

/// Keeps the host's next mapping from ending anywhere but where its start is at a
/// multiple of [`LARGE_PAGE`].
///
/// Guest and host addresses must agree below that size, else KVM maps the guest's
/// memory by small pages alone, with an exit for each. Kernels before 6.7 place
/// anonymous memory anywhere. They go from the top down: what is left free below
/// the spacer is where the next mapping goes; were it not, only time is lost.
struct Spacer {
    address: *mut libc::c_void,
    length: usize,
}

impl Spacer {
    fn above(length: usize) -> Option<Self> {
        let whole = length.checked_add(LARGE_PAGE)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no other.
        let base = unsafe { libc::mmap(ptr::null_mut(), whole, libc::PROT_NONE, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return None;
        }
        let start = (base as usize + LARGE_PAGE) & !(LARGE_PAGE - 1);
        let below = start + length - base as usize;
        // SAFETY: a part of the mapping just made, which nobody else knows of.
        unsafe { libc::munmap(base, below) };
        Some(Self { address: base.wrapping_byte_add(below), length: whole - below })
    }
}

impl Drop for Spacer {
    fn drop(&mut self) {
        // SAFETY: the rest of the mapping made in `above`; nothing points into it.
        unsafe { libc::munmap(self.address, self.length) };
    }
}

fn no_memory(bytes: u64, backing: Backing, e: &dyn std::fmt::Display) -> Error {
    let mib = bytes >> 20;
    Error::new(match backing.huge_pages {
        None => {
            format!("--memory: the host cannot map {mib} MiB for the guest ({e}); ask for less")
        }
        Some(size) => {
            let pool = format!("/sys/kernel/mm/hugepages/hugepages-{}kB", size.bytes() >> 10);
            match Path::new(&pool).is_dir() {
                true => format!(
                    "--hugepages: the host has too few free huge pages of {size}, {} are needed \
                     ({e}); raise {pool}/nr_hugepages",
                    bytes / size.bytes()
                ),
                false => format!(
                    "--hugepages={size}: this host has no huge pages of that size ({pool} is not \
                     there); choose the other size, or leave it out"
                ),
            }
        }
    })
}

/// Finds the pages now, where that was asked for, and locks them. Huge pages are
/// always found now: a control group may deny one that was reserved, and a guest's
/// access to it would end this process with SIGBUS.
fn hold(region: &MmapRegion, backing: Backing) -> Result<()> {
    let failed = |e: io::Error, flag: &str, hint: &str| {
        let mib = region.size() >> 20;
        Error::new(format!("{flag}: the host does not give {mib} MiB ({e}); {hint}"))
    };
    if backing.prefault || backing.huge_pages.is_some() {
        // SAFETY: the range is the region's own; populating changes no content.
        in_pieces(region, |address, length| unsafe {
            libc::madvise(address, length, libc::MADV_POPULATE_WRITE)
        })
        .map_err(|e| {
            let flag = if backing.prefault { "--prefault" } else { "--hugepages" };
            let hint = match e.raw_os_error() {
                Some(libc::EINVAL) => "it needs Linux 5.14 (MADV_POPULATE_WRITE)",
                _ => "ask for less --memory, or raise the control group's limit",
            };
            failed(e, flag, hint)
        })?;
    }
    if backing.lock {
        // SAFETY: the range is the region's own; locking changes no content.
        in_pieces(region, |address, length| unsafe { libc::mlock(address, length) })
            .map_err(|e| failed(e, "--mlock", "raise the limit on locked memory (ulimit -l)"))?;
    }
    Ok(())
}

/// Calls for one piece after the other: a signal is answered between two, where
/// a call for all of it could take minutes.
fn in_pieces(
    region: &MmapRegion,
    call: impl Fn(*mut libc::c_void, usize) -> libc::c_int,
) -> io::Result<()> {
    const PIECE: usize = 1 << 27;
    for offset in (0..region.size()).step_by(PIECE) {
        let address = region.as_ptr().wrapping_add(offset).cast();
        if call(address, PIECE.min(region.size() - offset)) != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Gives every range to KVM, slot by slot from 0, and returns the next free slot.
pub fn register(vm: &VmFd, memory: &GuestMemory) -> Result<u32> {
    let mut slot = 0;
    for region in memory.iter() {
        let description = kvm_userspace_memory_region {
            slot,
            flags: 0,
            guest_phys_addr: region.start_addr().0,
            memory_size: region.len(),
            userspace_addr: region.as_ptr() as u64,
        };
        // SAFETY: the mapping outlives the VM: `Machine` owns both and drops the
        // VM's descriptors and threads first; ranges do not overlap by
        // construction of `ranges`.
        unsafe { vm.set_user_memory_region(description) }.map_err(|e| {
            Error::new(format!(
                "--memory: KVM refuses {} MiB at {:#x} ({e}); ask for less",
                region.len() >> 20,
                region.start_addr().0
            ))
        })?;
        slot += 1;
    }
    Ok(slot)
}

/// Whether the whole 4 KiB page at `gpa` is RAM that a guest may use.
pub fn is_ram_page(memory: &GuestMemory, gpa: u64) -> bool {
    gpa & 0xfff == 0 && memory.check_range(GuestAddress(gpa), 4096)
}

/// End of the RAM below the hole.
pub fn low_end(memory: &GuestMemory) -> u64 {
    memory
        .iter()
        .map(|r| r.start_addr().0 + r.len())
        .filter(|end| *end <= HOLE_START)
        .max()
        .unwrap_or(HIGH_MEMORY)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_never_covers_the_hole() {
        for bytes in [MIN_BYTES, HOLE_START - 4096, HOLE_START, HOLE_START + 4096, 5 << 30] {
            let ranges = ranges(bytes);
            assert_eq!(ranges.iter().map(|r| r.1).sum::<u64>(), bytes);
            for (start, length) in ranges {
                assert!(start + length <= HOLE_START || start >= HOLE_END);
            }
        }
    }

    #[test]
    fn host_and_guest_addresses_agree_below_a_large_page() {
        // Sizes of which the newest kernels, too, would place the second anywhere.
        let sizes = [64 << 20, (64 << 20) + 4096, HOLE_START + (2 << 20)];
        let memories = sizes.map(|bytes| allocate(bytes, Backing::default()).unwrap());
        for region in memories.iter().flat_map(GuestMemoryBackend::iter) {
            assert_eq!(region.as_ptr() as usize % LARGE_PAGE, 0);
        }
    }

    #[test]
    fn too_little_memory_is_refused() {
        assert!(allocate(0, Backing::default()).is_err());
        assert!(allocate(MIN_BYTES + 1, Backing::default()).is_err());
        assert_eq!(low_end(&allocate(MIN_BYTES, Backing::default()).unwrap()), MIN_BYTES);
    }
}
