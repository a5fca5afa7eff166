//! Experiments that tell what a host does, where its capabilities do not.

use crate::cpuid::Template;
use crate::error::{Error, Result};
use crate::msr_filter;
use crate::topology::Topology;
use crate::tsc::{self, Rate};
use crate::{registers, vcpu};
use kvm_bindings::{
    KVM_CAP_X86_USER_SPACE_MSR, KVM_MSR_EXIT_REASON_FILTER, kvm_enable_cap,
    kvm_userspace_memory_region,
};
use kvm_ioctls::{
    Kvm, MsrFilterDefaultAction, MsrFilterRange, MsrFilterRangeFlags, VcpuExit, VcpuFd,
};
use pvclock::hyperv::msr;
use serde::Serialize;
use std::fmt;
use std::fs;
use std::time::Duration;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

/// Outcome of an experiment that may be impossible.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Answer {
    /// It does.
    Yes,
    /// It does not.
    No,
    /// The experiment could not be made.
    Unknown,
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Answer::Yes => "yes, by experiment",
            Answer::No => "no, by experiment",
            Answer::Unknown => "unknown: the experiment could not be made",
        })
    }
}

/// Where a guest's TSC stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Offset {
    /// Where KVM_VCPU_TSC_OFFSET puts it.
    Chosen,
    /// On the host's TSC, whatever is asked.
    Zero,
    /// Somewhere that cannot be known exactly.
    Unknown,
}

impl fmt::Display for Offset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Offset::Chosen => "exact, ours to choose",
            Offset::Zero => "exact, fixed at 0",
            Offset::Unknown => "not known exactly (--hv-impl user is refused)",
        })
    }
}

/// A VM with one vCPU.
pub struct Vcpu {
    vcpu: VcpuFd,
}

impl Vcpu {
    /// A vCPU with an in-kernel local APIC.
    ///
    /// # Errors
    /// KVM makes none.
    pub fn new(kvm: &Kvm) -> Result<Self> {
        let failed = |e| Error::new(format!("/dev/kvm: no VM to experiment with ({e})"));
        let vm = kvm.create_vm().map_err(failed)?;
        vm.create_irq_chip().map_err(failed)?;
        let vcpu = vm.create_vcpu(0).map_err(failed)?;
        Ok(Self { vcpu })
    }

    /// KVM_GET_TSC_KHZ, 0 where KVM does not tell.
    pub fn tsc_khz(&self) -> u32 {
        self.vcpu.get_tsc_khz().unwrap_or(0)
    }

    /// Whether KVM_VCPU_TSC_OFFSET does what it says.
    pub fn offset(&self) -> Offset {
        let wanted = tsc::read().wrapping_neg();
        match vcpu::place_tsc(&self.vcpu, wanted) {
            Ok(offset) if offset == wanted => Offset::Chosen,
            Ok(_) => Offset::Zero,
            Err(_) => Offset::Unknown,
        }
    }
}

/// Does a filtered RDMSR of the reference counter exit to user space?
pub fn hyperv_msr_exits(kvm: &Kvm) -> Answer {
    // mov ecx, MSR; rdmsr; out 0x80, al: in real mode, with operand-size prefix.
    let mut code = vec![0x66, 0xb9];
    code.extend(msr::TIME_REF_COUNT.to_le_bytes());
    code.extend([0x0f, 0x32, 0xe6, 0x80]);
    exits(kvm, msr::TIME_REF_COUNT, &code)
}

/// Does a filtered WRMSR of IA32_TSC_DEADLINE exit to user space? KVM's fast path
/// for this very MSR bypasses the filter on some hosts.
pub fn tsc_deadline_msr_exits(kvm: &Kvm) -> Answer {
    // mov ecx, MSR; xor eax, eax; xor edx, edx; wrmsr; out 0x80, al.
    let mut code = vec![0x66, 0xb9];
    code.extend(msr_filter::MSR_IA32_TSC_DEADLINE.to_le_bytes());
    code.extend([0x66, 0x31, 0xc0, 0x66, 0x31, 0xd2, 0x0f, 0x30, 0xe6, 0x80]);
    exits(kvm, msr_filter::MSR_IA32_TSC_DEADLINE, &code)
}

/// Runs `code` in real mode on a VM that filters `msr`, and sees whether the
/// access comes to us before the OUT that follows it does.
fn exits(kvm: &Kvm, msr: u32, code: &[u8]) -> Answer {
    experiment(kvm, msr, code).unwrap_or(Answer::Unknown)
}

fn experiment(kvm: &Kvm, msr: u32, code: &[u8]) -> Option<Answer> {
    const START: u64 = 0x1000;
    let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 0x4000)]).ok()?;
    memory.write_slice(code, GuestAddress(START)).ok()?;
    let vm = kvm.create_vm().ok()?;
    // With the local APIC in the kernel and its timer in deadline mode: only then
    // does a host's fast path take the write.
    vm.create_irq_chip().ok()?;
    let reasons = u64::from(KVM_MSR_EXIT_REASON_FILTER);
    let cap = kvm_enable_cap {
        cap: KVM_CAP_X86_USER_SPACE_MSR,
        args: [reasons, 0, 0, 0],
        ..Default::default()
    };
    vm.enable_cap(&cap).ok()?;
    let none = [0u8; 1];
    let both = MsrFilterRangeFlags::READ | MsrFilterRangeFlags::WRITE;
    let range = MsrFilterRange { flags: both, base: msr, msr_count: 1, bitmap: &none };
    vm.set_msr_filter(MsrFilterDefaultAction::ALLOW, &[range]).ok()?;
    let region = memory.iter().next()?;
    let slot = kvm_userspace_memory_region {
        slot: 0,
        guest_phys_addr: 0,
        memory_size: region.len(),
        userspace_addr: region.as_ptr() as u64,
        flags: 0,
    };
    // SAFETY: `memory` is dropped after the VM and vCPU that use it (locals drop
    // in reverse order of declaration).
    unsafe { vm.set_user_memory_region(slot) }.ok()?;
    let mut vcpu = vm.create_vcpu(0).ok()?;
    let supported = kvm.get_supported_cpuid(kvm_bindings::KVM_MAX_CPUID_ENTRIES).ok()?;
    let template = Template::new(&supported, Topology::one_socket(1), true, None);
    vcpu.set_cpuid2(&template.for_vcpu(0).ok()?).ok()?;
    registers::set_deadline_timer(&vcpu).ok()?;
    let mut sregs = vcpu.get_sregs().ok()?;
    sregs.cs.base = 0;
    sregs.cs.selector = 0;
    vcpu.set_sregs(&sregs).ok()?;
    let mut regs = vcpu.get_regs().ok()?;
    (regs.rip, regs.rflags) = (START, 2);
    vcpu.set_regs(&regs).ok()?;
    match vcpu.run().ok()? {
        VcpuExit::X86Rdmsr(_) | VcpuExit::X86Wrmsr(_) => Some(Answer::Yes),
        VcpuExit::IoOut(..) => Some(Answer::No),
        _ => None,
    }
}

/// The host's TSC.
#[derive(Debug, Clone, Serialize)]
pub struct Tsc {
    /// Frequency measured against CLOCK_MONOTONIC_RAW, in Hz.
    pub hz: f64,
    /// How far off the measurement may be, in ppm: width of the two brackets over
    /// the span.
    pub uncertainty_ppm: f64,
    /// Length of the measurement in ms.
    pub span_ms: u64,
    /// Does not change its rate with the core's frequency.
    pub constant: bool,
    /// Does not stop in deep sleep.
    pub nonstop: bool,
    /// The host kernel's own clocksource.
    pub host_clocksource: String,
}

/// Measures the TSC; `cpuinfo` is the text of /proc/cpuinfo.
pub fn tsc(cpuinfo: &str) -> Tsc {
    const SPAN: Duration = Duration::from_millis(150);
    let Rate { hz, uncertainty_ppm } = Rate::measure(SPAN);
    let flags = cpuinfo.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
    let has = |name| flags.split_whitespace().any(|flag| flag == name);
    let path = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    Tsc {
        hz,
        uncertainty_ppm,
        span_ms: SPAN.as_millis() as u64,
        constant: has("constant_tsc"),
        nonstop: has("nonstop_tsc"),
        host_clocksource: fs::read_to_string(path).unwrap_or_default().trim().into(),
    }
}
