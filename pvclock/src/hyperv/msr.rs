//! Synthetic MSR indices, named as in the TLFS without `HV_X64_MSR_`.

use std::ops::RangeInclusive;

/// Every index that Hyper-V may claim; the VMM filters the whole of it, so that an
/// MSR we do not offer faults whatever the host's KVM would do with it.
pub const RANGE: RangeInclusive<u32> = 0x4000_0000..=0x4000_01FF;

/// Guest OS identity; non-zero before the hypercall page can be enabled.
pub const GUEST_OS_ID: u32 = 0x4000_0000;
/// Hypercall page: GPA, locked, enable.
pub const HYPERCALL: u32 = 0x4000_0001;
/// Index of this virtual processor, read-only.
pub const VP_INDEX: u32 = 0x4000_0002;
/// Reference time in 100 ns, read-only.
pub const TIME_REF_COUNT: u32 = 0x4000_0020;
/// Reference TSC page: GPA, enable.
pub const REFERENCE_TSC: u32 = 0x4000_0021;
/// TSC frequency in Hz, read-only.
pub const TSC_FREQUENCY: u32 = 0x4000_0022;
/// Local APIC timer frequency in Hz, read-only.
pub const APIC_FREQUENCY: u32 = 0x4000_0023;
/// VP assist page: GPA, enable.
pub const VP_ASSIST_PAGE: u32 = 0x4000_0073;
/// Configuration of synthetic timer 0; that of timer n is 2n further.
pub const STIMER0_CONFIG: u32 = 0x4000_00B0;
/// Count of synthetic timer 0; that of timer n is 2n further.
pub const STIMER0_COUNT: u32 = 0x4000_00B1;
/// Count of synthetic timer 3, the last of the timers' MSRs.
pub const STIMER3_COUNT: u32 = 0x4000_00B7;
/// The guest's wish to see an invariant TSC.
pub const TSC_INVARIANT_CONTROL: u32 = 0x4000_0118;
