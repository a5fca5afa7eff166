//! CPUID leaves 0x40000000–0x40000006 (TLFS, "Feature and Interface Discovery").

use super::Features;

/// CPUID.1:ECX bit that says a hypervisor is present; without it Linux never looks
/// at these leaves.
pub const CPUID_1_ECX_HYPERVISOR: u32 = 1 << 31;

/// One CPUID leaf; all of Hyper-V's have no subleaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)] // named by the instruction
pub struct CpuidLeaf {
    pub function: u32,
    pub eax: u32,
    pub ebx: u32,
    pub ecx: u32,
    pub edx: u32,
}

const MAX_LEAF: u32 = 0x4000_0006;

/// Partition privileges, 0x40000003.EAX.
mod privilege {
    pub const TIME_REF_COUNT: u32 = 1 << 1;
    pub const SYNTHETIC_TIMERS: u32 = 1 << 3;
    pub const HYPERCALL: u32 = 1 << 5;
    pub const VP_INDEX: u32 = 1 << 6;
    pub const REFERENCE_TSC: u32 = 1 << 9;
    pub const FREQUENCY: u32 = 1 << 11;
    pub const TSC_INVARIANT: u32 = 1 << 15;
}

/// Features, 0x40000003.EDX.
mod feature {
    pub const FREQUENCY: u32 = 1 << 8;
    pub const STIMER_DIRECT_MODE: u32 = 1 << 19;
}

/// The leaves of a VM with `vcpus` virtual processors, in ascending order.
///
/// They replace the host KVM's own at 0x40000000: Linux takes the highest base
/// that it finds, so KVM's leaves anywhere would hide these.
pub fn cpuid_leaves(features: &Features, vcpus: u32) -> Vec<CpuidLeaf> {
    let when = |offered: bool, bit: u32| if offered { bit } else { 0 };

    // HYPERCALL and VP_INDEX are mandatory: Linux ignores the interface otherwise.
    let privileges = privilege::HYPERCALL
        | privilege::VP_INDEX
        | privilege::FREQUENCY
        | when(features.ref_counter, privilege::TIME_REF_COUNT)
        | when(features.tsc_page, privilege::REFERENCE_TSC)
        | when(features.stimer, privilege::SYNTHETIC_TIMERS)
        | when(features.invariant_tsc, privilege::TSC_INVARIANT);
    let edx = feature::FREQUENCY | when(features.stimer, feature::STIMER_DIRECT_MODE);

    vec![
        CpuidLeaf {
            function: 0x4000_0000,
            eax: MAX_LEAF,
            ebx: u32::from_le_bytes(*b"Micr"),
            ecx: u32::from_le_bytes(*b"osof"),
            edx: u32::from_le_bytes(*b"t Hv"),
        },
        CpuidLeaf {
            function: 0x4000_0001,
            eax: u32::from_le_bytes(*b"Hv#1"),
            ..CpuidLeaf::default()
        },
        // No version: we are not a build of Hyper-V.
        CpuidLeaf { function: 0x4000_0002, ..CpuidLeaf::default() },
        // EBX, the hypercall privileges, stays 0.
        CpuidLeaf { function: 0x4000_0003, eax: privileges, edx, ..CpuidLeaf::default() },
        // EAX 0 recommends no hypercall; EBX all ones: never report a spinning lock.
        CpuidLeaf { function: 0x4000_0004, ebx: u32::MAX, ..CpuidLeaf::default() },
        // Limits: virtual and logical processors.
        CpuidLeaf { function: 0x4000_0005, eax: vcpus, ebx: vcpus, ..CpuidLeaf::default() },
        CpuidLeaf { function: MAX_LEAF, ..CpuidLeaf::default() },
    ]
}
