//! The MSRs that all virtual processors share.

use super::{Effect, Features, MsrRead, MsrWrite, OverlayMove, msr};

/// Contents of the hypercall page; the rest of the page is 0.
///
/// Every call returns HV_STATUS_INVALID_HYPERCALL_CODE (2) without an exit: in RAX
/// for 64-bit callers and in EDX:EAX for 32-bit ones, whose EDX must be cleared
/// while a 64-bit caller's RDX must not. The byte 0x48 tells the two apart: alone
/// it is `dec eax`, which clears ZF, but to a 64-bit CPU it is a prefix of the NOP.
#[rustfmt::skip]
pub const HYPERCALL_PAGE: [u8; 14] = [
    0x31, 0xC0,                   // xor eax, eax
    0x48, 0x90,                   // 64-bit: nop; 32-bit: dec eax, nop
    0x74, 0x02,                   // jz +2 (64-bit only)
    0x31, 0xD2,                   // xor edx, edx
    0xB8, 0x02, 0x00, 0x00, 0x00, // mov eax, 2
    0xC3,                         // ret
];

const ENABLE: u64 = 1 << 0;
const HYPERCALL_LOCKED: u64 = 1 << 1;
const GPA: u64 = !0xFFF;

/// What the frequency MSRs say, in Hz, for the life of the VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frequencies {
    /// TSC frequency.
    pub tsc_hz: u64,
    /// Local APIC timer frequency before its divider: 1 GHz on KVM by default.
    pub apic_hz: u64,
}

/// The state of the partition-wide MSRs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partition {
    /// What the VM offers; fixed.
    pub features: Features,
    /// What the frequency MSRs say; fixed.
    pub frequencies: Frequencies,
    /// [`msr::GUEST_OS_ID`].
    pub guest_os_id: u64,
    /// [`msr::HYPERCALL`].
    pub hypercall: u64,
    /// [`msr::REFERENCE_TSC`].
    pub reference_tsc: u64,
    /// [`msr::TSC_INVARIANT_CONTROL`].
    pub tsc_invariant_control: u64,
}

impl Partition {
    /// A partition after reset.
    pub fn new(features: Features, frequencies: Frequencies) -> Self {
        Self {
            features,
            frequencies,
            guest_os_id: 0,
            hypercall: 0,
            reference_tsc: 0,
            tsc_invariant_control: 0,
        }
    }

    /// The guest physical address of the hypercall page, if enabled.
    pub fn hypercall_page(&self) -> Option<u64> {
        page(self.hypercall)
    }

    /// The guest physical address of the reference TSC page, if enabled.
    pub fn reference_tsc_page(&self) -> Option<u64> {
        page(self.reference_tsc)
    }

    /// RDMSR.
    pub fn read_msr(&self, msr: u32) -> MsrRead {
        match msr {
            msr::GUEST_OS_ID => MsrRead::Handled(self.guest_os_id),
            msr::HYPERCALL => MsrRead::Handled(self.hypercall),
            msr::REFERENCE_TSC if self.features.tsc_page => MsrRead::Handled(self.reference_tsc),
            msr::TSC_FREQUENCY => MsrRead::Handled(self.frequencies.tsc_hz),
            msr::APIC_FREQUENCY => MsrRead::Handled(self.frequencies.apic_hz),
            msr::TSC_INVARIANT_CONTROL if self.features.invariant_tsc => {
                MsrRead::Handled(self.tsc_invariant_control)
            }
            _ if msr::RANGE.contains(&msr) => MsrRead::Fault,
            _ => MsrRead::NotHandled,
        }
    }

    /// WRMSR. `is_ram` says whether the page at a guest physical address is RAM that
    /// an overlay can cover; enabling one elsewhere faults.
    pub fn write_msr(&mut self, msr: u32, value: u64, is_ram: impl Fn(u64) -> bool) -> MsrWrite {
        match msr {
            msr::GUEST_OS_ID => self.set_guest_os_id(value),
            msr::HYPERCALL => self.set_hypercall(value, is_ram),
            msr::REFERENCE_TSC if self.features.tsc_page => self.set_reference_tsc(value, is_ram),
            msr::TSC_INVARIANT_CONTROL if self.features.invariant_tsc => {
                self.set_tsc_invariant_control(value)
            }
            // Among them the read-only ones.
            _ if msr::RANGE.contains(&msr) => MsrWrite::Fault,
            _ => MsrWrite::NotHandled,
        }
    }

    /// TLFS, "Reporting the Guest OS Identity": clearing it disables the hypercall
    /// page.
    fn set_guest_os_id(&mut self, value: u64) -> MsrWrite {
        self.guest_os_id = value;
        let old = self.hypercall;
        if value == 0 {
            self.hypercall &= !ENABLE;
        }
        MsrWrite::Handled(overlay_move(old, self.hypercall).map(Effect::HypercallPage))
    }

    /// TLFS, "Establishing the Hypercall Interface". A locked register ignores
    /// writes, and enabling has no effect while the guest OS id is 0. Reserved bits
    /// are preserved.
    fn set_hypercall(&mut self, value: u64, is_ram: impl Fn(u64) -> bool) -> MsrWrite {
        if self.hypercall & HYPERCALL_LOCKED != 0 {
            return MsrWrite::Handled(None);
        }
        let value = if self.guest_os_id == 0 { value & !ENABLE } else { value };
        if page(value).is_some_and(|gpa| !is_ram(gpa)) {
            return MsrWrite::Fault;
        }
        let old = std::mem::replace(&mut self.hypercall, value);
        MsrWrite::Handled(overlay_move(old, value).map(Effect::HypercallPage))
    }

    /// TLFS, "Reference Time Stamp Counter (TSC) Page MSR". Reserved bits are
    /// preserved.
    fn set_reference_tsc(&mut self, value: u64, is_ram: impl Fn(u64) -> bool) -> MsrWrite {
        if page(value).is_some_and(|gpa| !is_ram(gpa)) {
            return MsrWrite::Fault;
        }
        let old = std::mem::replace(&mut self.reference_tsc, value);
        MsrWrite::Handled(overlay_move(old, value).map(Effect::ReferenceTscPage))
    }

    /// Bit 0 makes CPUID announce the invariant TSC; the others must be 0.
    fn set_tsc_invariant_control(&mut self, value: u64) -> MsrWrite {
        if value & !1 != 0 {
            return MsrWrite::Fault;
        }
        let old = std::mem::replace(&mut self.tsc_invariant_control, value);
        MsrWrite::Handled((old != value).then_some(Effect::InvariantTsc(value == 1)))
    }
}

/// The page that an overlay MSR enables, if it does.
fn page(msr: u64) -> Option<u64> {
    (msr & ENABLE != 0).then_some(msr & GPA)
}

fn overlay_move(old: u64, new: u64) -> Option<OverlayMove> {
    let (from, to) = (page(old), page(new));
    (from != to).then_some(OverlayMove { from, to })
}
