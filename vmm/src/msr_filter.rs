//! Which MSR accesses come to user space, and how KVM is told.

use crate::error::{Error, Result};
use kvm_bindings::{
    KVM_CAP_X86_USER_SPACE_MSR, KVM_MSR_EXIT_REASON_FILTER, KVM_MSR_EXIT_REASON_INVAL,
    KVM_MSR_EXIT_REASON_UNKNOWN, kvm_enable_cap,
};
use kvm_ioctls::{MsrFilterDefaultAction, MsrFilterRange, MsrFilterRangeFlags, VmFd};
use pvclock::hyperv::msr;

/// Time-stamp counter.
pub const MSR_IA32_TSC: u32 = 0x10;
/// Per-thread TSC adjustment.
pub const MSR_IA32_TSC_ADJUST: u32 = 0x3b;
/// Deadline of the local APIC timer, in TSC cycles.
pub const MSR_IA32_TSC_DEADLINE: u32 = 0x6e0;

/// Asks KVM to send unknown and refused MSR accesses here; with `hyperv` those of
/// the Hyper-V range, with `tsc_deadline` those of [`MSR_IA32_TSC_DEADLINE`], and
/// with either the writes that would move a vCPU's TSC.
///
/// A vCPU whose TSC moved would read another time from the TSC page than its
/// neighbours, and its deadlines would not be where we wait for them, so the guest
/// may read but not move it.
pub fn install(vm: &VmFd, hyperv: bool, tsc_deadline: bool) -> Result<()> {
    let reasons =
        KVM_MSR_EXIT_REASON_FILTER | KVM_MSR_EXIT_REASON_UNKNOWN | KVM_MSR_EXIT_REASON_INVAL;
    let capability = kvm_enable_cap {
        cap: KVM_CAP_X86_USER_SPACE_MSR,
        args: [u64::from(reasons), 0, 0, 0],
        ..Default::default()
    };
    let enabled = vm.enable_cap(&capability);
    let flag = if hyperv { "--hv-tsc-page" } else { "--lapic-timer offload" };
    if !hyperv && !tsc_deadline {
        // Only statistics lose something.
        return Ok(());
    }
    enabled.map_err(|e| {
        Error::new(format!(
            "{flag}: this host's KVM cannot send MSR accesses to user space ({e}); it \
             takes Linux 5.10, or use {}",
            if hyperv { "--hv-impl kernel" } else { "--lapic-timer kernel" }
        ))
    })?;
    // A cleared bit denies the access, which then exits to us.
    const COUNT: u32 = *msr::RANGE.end() - *msr::RANGE.start() + 1;
    let none = [0u8; COUNT.div_ceil(8) as usize];
    let range = |flags, base, msr_count| MsrFilterRange { flags, base, msr_count, bitmap: &none };
    let both = MsrFilterRangeFlags::READ | MsrFilterRangeFlags::WRITE;
    let mut ranges = vec![
        range(MsrFilterRangeFlags::WRITE, MSR_IA32_TSC, 1),
        range(MsrFilterRangeFlags::WRITE, MSR_IA32_TSC_ADJUST, 1),
    ];
    if hyperv {
        ranges.push(range(both, *msr::RANGE.start(), COUNT));
    }
    if tsc_deadline {
        ranges.push(range(both, MSR_IA32_TSC_DEADLINE, 1));
    }
    vm.set_msr_filter(MsrFilterDefaultAction::ALLOW, &ranges)
        .map_err(|e| Error::new(format!("{flag}: this host's KVM refuses the MSR filter ({e})")))
}
