//! Guest RAM: one range below the device hole, one above it.

use crate::error::{Error, Result};
use crate::layout::{HIGH_MEMORY, HOLE_END, HOLE_START};
use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

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

/// Maps `bytes` of zeroed anonymous memory for the guest.
///
/// # Errors
/// Sizes below [`MIN_BYTES`] or beyond what the host can map.
pub fn allocate(bytes: u64) -> Result<GuestMemory> {
    if bytes < MIN_BYTES {
        return Err(Error::new(format!(
            "--memory: {bytes} bytes is too little, the least is {} MiB",
            MIN_BYTES >> 20
        )));
    }
    if !bytes.is_multiple_of(4096) {
        return Err(Error::new(format!("--memory: {bytes} bytes is not a whole number of pages")));
    }
    let ranges: Vec<_> = ranges(bytes)
        .into_iter()
        .map(|(start, length)| (GuestAddress(start), length as usize))
        .collect();
    GuestMemory::from_ranges(&ranges).map_err(|e| {
        Error::new(format!(
            "--memory: the host cannot map {} MiB for the guest ({e}); ask for less",
            bytes >> 20
        ))
    })
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
    fn too_little_memory_is_refused() {
        assert!(allocate(0).is_err());
        assert!(allocate(MIN_BYTES + 1).is_err());
        assert_eq!(low_end(&allocate(MIN_BYTES).unwrap()), MIN_BYTES);
    }
}
