//! A vCPU: its set-up, its thread's loop, and the answer to each exit.

use crate::cpuid::Template;
use crate::ending::Ending;
use crate::hyperv::HyperV;
use crate::lapic_timer::{LapicTimer, LocalVector};
use crate::lifecycle::{Lifecycle, Seat, State};
use crate::msr_filter::{MSR_IA32_TSC, MSR_IA32_TSC_ADJUST, MSR_IA32_TSC_DEADLINE};
use crate::registers::{self, Entry, SetupError};
use crate::stats::{Access, Subject, VcpuStats};
use crate::tsc;
use devices::bus::Bus;
use kvm_bindings::{
    KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET, Msrs, kvm_device_attr, kvm_msr_entry, kvm_run,
};
use kvm_ioctls::{VcpuExit, VcpuFd};
use pvclock::hyperv::{MsrRead, MsrWrite};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use vmm_sys_util::ioctl::{ioctl_with_mut_ref, ioctl_with_ref};

mod ioctl {
    #![allow(missing_docs)] // the macro's function takes no comment
    // kvm-ioctls has this call for vCPUs of other architectures only.
    vmm_sys_util::ioctl_iow_nr!(
        KVM_SET_DEVICE_ATTR,
        kvm_bindings::KVMIO,
        0xe1,
        kvm_bindings::kvm_device_attr
    );
    vmm_sys_util::ioctl_ior_nr!(
        KVM_GET_LAPIC,
        kvm_bindings::KVMIO,
        0x8e,
        kvm_bindings::kvm_lapic_state
    );
}

/// Everything that an exit may concern.
pub struct Peripherals {
    /// Port space.
    pub ports: Bus,
    /// Memory-mapped devices.
    pub mmio: Bus,
    /// The Hyper-V clock, if this process serves it.
    pub hyperv: Option<HyperV>,
    /// The local APIC timers, if this process serves them: one a vCPU.
    pub lapic_timers: Vec<Arc<LapicTimer>>,
}

/// What follows from an exit.
#[derive(Debug, PartialEq, Eq)]
pub enum Action {
    /// Enter the guest again.
    Continue,
    /// The machine ends.
    End(Ending),
    /// The machine ends because KVM cannot go on; registers tell where.
    Stuck(String),
}

/// Answers one exit of vCPU `index`. `item_size` is the operand size in bytes
/// of a port access, which a string instruction repeats; `local_vector` reads that
/// of the vCPU's timer.
pub fn handle_exit(
    exit: VcpuExit<'_>,
    item_size: usize,
    index: usize,
    peripherals: &Peripherals,
    local_vector: impl Fn() -> LocalVector,
) -> (Subject, Action) {
    let (subject, action) = match exit {
        VcpuExit::IoIn(port, data) => {
            let mut range = None;
            for item in data.chunks_mut(item_size.max(1)) {
                range = peripherals.ports.read(u64::from(port), item);
            }
            (Subject::Port(Access::Read, range), Action::Continue)
        }
        VcpuExit::IoOut(port, data) => {
            let mut range = None;
            for item in data.chunks(item_size.max(1)) {
                range = peripherals.ports.write(u64::from(port), item);
            }
            (Subject::Port(Access::Write, range), Action::Continue)
        }
        VcpuExit::MmioRead(address, data) => {
            let range = peripherals.mmio.read(address, data);
            (Subject::Mmio(Access::Read, range), Action::Continue)
        }
        VcpuExit::MmioWrite(address, data) => {
            let range = peripherals.mmio.write(address, data);
            (Subject::Mmio(Access::Write, range), Action::Continue)
        }
        VcpuExit::X86Rdmsr(exit) => {
            let msr = exit.index;
            match read_msr(index, msr, peripherals, local_vector) {
                Some(value) => *exit.data = value,
                None => *exit.error = 1,
            }
            (Subject::Msr(Access::Read, msr), Action::Continue)
        }
        VcpuExit::X86Wrmsr(exit) => {
            let msr = exit.index;
            if !write_msr(index, msr, exit.data, peripherals, local_vector) {
                *exit.error = 1;
            }
            (Subject::Msr(Access::Write, msr), Action::Continue)
        }
        VcpuExit::Hlt => (Subject::Halt, Action::Continue),
        VcpuExit::Intr => (Subject::Interrupted, Action::Continue),
        VcpuExit::IrqWindowOpen | VcpuExit::SetTpr | VcpuExit::IoapicEoi(_) => {
            (Subject::Other, Action::Continue)
        }
        VcpuExit::Shutdown => (Subject::Other, Action::End(Ending::TripleFault)),
        VcpuExit::FailEntry(reason, cpu) => (
            Subject::Other,
            Action::Stuck(format!("the processor refused entry, reason {reason:#x} on CPU {cpu}")),
        ),
        VcpuExit::InternalError => (Subject::Other, Action::Stuck(String::new())),
        VcpuExit::MemoryFault { gpa, .. } => {
            (Subject::Other, Action::Stuck(format!("memory fault at {gpa:#x}")))
        }
        other => (Subject::Other, Action::Stuck(format!("unexpected exit {other:?}"))),
    };
    (subject, action)
}

/// The value that RDMSR gets, or `None` for #GP.
fn read_msr(
    index: usize,
    msr: u32,
    peripherals: &Peripherals,
    local_vector: impl Fn() -> LocalVector,
) -> Option<u64> {
    if msr == MSR_IA32_TSC_DEADLINE
        && let Some(timer) = peripherals.lapic_timers.get(index)
    {
        return Some(timer.read(local_vector()));
    }
    match peripherals.hyperv.as_ref()?.read_msr(index, msr) {
        MsrRead::Handled(value) => Some(value),
        MsrRead::Fault | MsrRead::NotHandled => None,
    }
}

/// Whether WRMSR succeeds; otherwise the guest gets #GP.
fn write_msr(
    index: usize,
    msr: u32,
    value: u64,
    peripherals: &Peripherals,
    local_vector: impl Fn() -> LocalVector,
) -> bool {
    if msr == MSR_IA32_TSC_DEADLINE
        && let Some(timer) = peripherals.lapic_timers.get(index)
    {
        timer.write(value, local_vector());
        return true;
    }
    let hyperv = peripherals.hyperv.as_ref();
    match hyperv.map_or(MsrWrite::NotHandled, |hyperv| hyperv.write_msr(index, msr, value)) {
        MsrWrite::Handled(_) => true,
        MsrWrite::Fault => false,
        // Taken and dropped: a moved TSC would make this vCPU's clock differ.
        MsrWrite::NotHandled => matches!(msr, MSR_IA32_TSC | MSR_IA32_TSC_ADJUST),
    }
}

/// The local vector of a vCPU's timer; the calling thread must be the vCPU's, or
/// the call waits until the vCPU leaves the guest.
fn local_vector(vcpu: BorrowedFd<'_>) -> LocalVector {
    let mut lapic = kvm_bindings::kvm_lapic_state::default();
    // SAFETY: fills `lapic`, the structure that this call is defined for. It fails
    // only without a local APIC in the kernel, and leaves an idle timer.
    unsafe { ioctl_with_mut_ref(&vcpu, ioctl::KVM_GET_LAPIC(), &mut lapic) };
    LocalVector::of(&lapic)
}

/// Why a vCPU's TSC cannot be placed on the host's exactly.
#[derive(Debug)]
pub struct TscUnknown;

/// Gives the vCPU the TSC offset that its machine agreed on, and returns the
/// offset that the hardware then applies, found by experiment: hosts exist that
/// take the attribute and leave the TSC alone.
pub fn place_tsc(vcpu: &VcpuFd, offset: u64) -> Result<u64, TscUnknown> {
    let attribute = kvm_device_attr {
        group: KVM_VCPU_TSC_CTRL,
        attr: u64::from(KVM_VCPU_TSC_OFFSET),
        addr: &raw const offset as u64,
        flags: 0,
    };
    // SAFETY: the attribute is plain data, and `addr` points at a live u64, the
    // type that this attribute reads (KVM API, KVM_VCPU_TSC_OFFSET).
    unsafe { ioctl_with_ref(vcpu, ioctl::KVM_SET_DEVICE_ATTR(), &attribute) };
    let before = tsc::read_ordered();
    let guest = read_tsc(vcpu).ok_or(TscUnknown)?;
    let after = tsc::read_ordered();
    [offset, 0]
        .into_iter()
        .find(|offset| (before..=after).contains(&guest.wrapping_sub(*offset)))
        .ok_or(TscUnknown)
}

fn read_tsc(vcpu: &VcpuFd) -> Option<u64> {
    let entry = kvm_msr_entry { index: MSR_IA32_TSC, ..Default::default() };
    let mut msrs = Msrs::from_entries(&[entry]).ok()?;
    (vcpu.get_msrs(&mut msrs).ok()? == 1).then(|| msrs.as_slice()[0].data)
}

/// Makes a new vCPU look like firmware left it; `entry` is set on the boot vCPU.
pub fn set_up(
    vcpu: &VcpuFd,
    index: u32,
    template: &Template,
    entry: Option<Entry>,
) -> Result<(), SetupError> {
    let cpuid = template
        .for_vcpu(index)
        .map_err(|_| ("CPUID table", kvm_ioctls::Error::new(libc::E2BIG)))?;
    vcpu.set_cpuid2(&cpuid).map_err(|e| ("KVM_SET_CPUID2", e))?;
    registers::set_common_state(vcpu)?;
    match entry {
        Some(entry) => registers::set_boot_state(vcpu, entry),
        None => Ok(()),
    }
}

/// Runs the guest on this thread until the machine ends; `enters` is called
/// right before the first KVM_RUN, if there is one.
pub fn run(
    mut vcpu: VcpuFd,
    index: usize,
    lifecycle: &Lifecycle,
    peripherals: &Peripherals,
    stats: &VcpuStats,
    enters: impl FnOnce(),
) {
    let run: *mut kvm_run = vcpu.get_kvm_run();
    let seat = Seat::new(lifecycle, index, run);
    // An AP executes nothing before its SIPI, for which it waits inside KVM_RUN: it need
    // not wait for the machine's start first. One that is later than that may find the
    // machine paused already, and nobody who would kick it out again.
    let mut inert = index != 0 && lifecycle.state() == State::Starting;
    if inert || lifecycle.state() == State::Running || lifecycle.park() {
        enters();
    }
    // SAFETY: `vcpu` lives to the end of this function and keeps the descriptor
    // open. Not a borrow of `vcpu`, because an exit borrows all of that.
    let fd = unsafe { BorrowedFd::borrow_raw(vcpu.as_raw_fd()) };
    loop {
        if lifecycle.state() != State::Running && !inert {
            if !lifecycle.park() {
                break;
            }
            // Fails, harmlessly, for a guest that has no kvm-clock.
            let _ = vcpu.kvmclock_ctrl();
        }
        inert = false;
        let exit = vcpu.run();
        let left = tsc::read();
        let (subject, action) = match exit {
            Ok(exit) => {
                // SAFETY: the mapping lives as long as `vcpu`, KVM writes it only
                // inside KVM_RUN, and `exit` borrows other bytes of it. Any union
                // member may be read as plain bytes; it matters for port exits only.
                let item_size = usize::from(unsafe { (*run).__bindgen_anon_1.io.size });
                handle_exit(exit, item_size, index, peripherals, || local_vector(fd))
            }
            Err(e) if matches!(e.errno(), libc::EINTR | libc::EAGAIN) => {
                vcpu.set_kvm_immediate_exit(0);
                (Subject::Interrupted, Action::Continue)
            }
            Err(e) => (Subject::Other, Action::Stuck(format!("KVM_RUN: {e}"))),
        };
        match action {
            Action::Continue => {}
            Action::End(ending) => lifecycle.end(ending),
            Action::Stuck(why) => {
                lifecycle.end(Ending::KvmInternalError(describe_stuck(&mut vcpu, index, &why)));
            }
        }
        stats.record(subject, tsc::read().wrapping_sub(left));
    }
    // Before `vcpu` goes, and with it the mapping that the seat points into.
    drop(seat);
}

/// One line: what stopped, where, and on which instruction.
fn describe_stuck(vcpu: &mut VcpuFd, index: usize, why: &str) -> String {
    const EMULATION: u32 = kvm_bindings::KVM_INTERNAL_ERROR_EMULATION;
    const BYTES_VALID: u64 =
        kvm_bindings::KVM_INTERNAL_ERROR_EMULATION_FLAG_INSTRUCTION_BYTES as u64;
    let rip = vcpu.get_regs().map_or("unknown".into(), |r| format!("{:#x}", r.rip));
    let run = vcpu.get_kvm_run();
    let mut what = why.to_string();
    let mut bytes = String::new();
    if run.exit_reason == kvm_bindings::KVM_EXIT_INTERNAL_ERROR && why.is_empty() {
        // SAFETY: the exit reason says that KVM filled this member of the union.
        let failure = unsafe { run.__bindgen_anon_1.emulation_failure };
        what = match failure.suberror {
            EMULATION => "an instruction cannot be emulated (suberror 1)".into(),
            other => format!("suberror {other}"),
        };
        if failure.suberror == EMULATION && failure.ndata >= 1 && failure.flags & BYTES_VALID != 0 {
            // SAFETY: the flag says that these are the instruction's bytes.
            let instruction = unsafe { failure.__bindgen_anon_1.__bindgen_anon_1 };
            let length = usize::from(instruction.insn_size).min(instruction.insn_bytes.len());
            bytes = instruction.insn_bytes[..length].iter().map(|b| format!(" {b:02x}")).collect();
        }
    }
    if bytes.is_empty() {
        bytes = " not known".into();
    }
    format!("{what}; vCPU {index}, RIP {rip}, instruction bytes{bytes}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use devices::bus::{Device, Range};
    use kvm_ioctls::{MsrExitReason, ReadMsrExit, WriteMsrExit};
    use std::sync::Mutex;

    #[derive(Default)]
    struct Log(Mutex<Vec<Vec<u8>>>);

    impl Device for Log {
        fn read(&self, offset: u64, data: &mut [u8]) {
            data.fill(offset as u8 + 1);
        }
        fn write(&self, _: u64, data: &[u8]) {
            self.0.lock().unwrap().push(data.to_vec());
        }
    }

    fn peripherals(device: Arc<Log>) -> Peripherals {
        let range = |base| Range { name: "log", base, len: 8, device: device.clone() };
        Peripherals {
            ports: Bus::new(vec![range(0x3f8)]).unwrap(),
            mmio: Bus::new(vec![range(0xfed0_0000)]).unwrap(),
            hyperv: None,
            lapic_timers: vec![],
        }
    }

    fn no_timer() -> LocalVector {
        LocalVector(1 << 16)
    }

    #[test]
    fn a_string_instruction_is_many_accesses() {
        let device = Arc::new(Log::default());
        let p = peripherals(device.clone());
        let (subject, action) = handle_exit(VcpuExit::IoOut(0x3f8, b"ab"), 1, 0, &p, no_timer);
        assert_eq!((subject, action), (Subject::Port(Access::Write, Some(0)), Action::Continue));
        handle_exit(VcpuExit::IoOut(0x3f8, b"cd"), 2, 0, &p, no_timer);
        assert_eq!(*device.0.lock().unwrap(), [b"a".to_vec(), b"b".to_vec(), b"cd".to_vec()]);
    }

    #[test]
    fn what_nobody_claims_reads_as_ones() {
        let p = peripherals(Default::default());
        let mut data = [0; 4];
        let (subject, _) = handle_exit(VcpuExit::MmioRead(0x1000, &mut data), 0, 0, &p, no_timer);
        assert_eq!(subject, Subject::Mmio(Access::Read, None));
        assert_eq!(data, [0xff; 4]);
    }

    #[test]
    fn an_unknown_msr_is_a_fault() {
        let p = peripherals(Default::default());
        let (mut error, mut data) = (0, 0);
        let exit = ReadMsrExit {
            error: &mut error,
            reason: MsrExitReason::Unknown,
            index: 0x4000_0020,
            data: &mut data,
        };
        handle_exit(VcpuExit::X86Rdmsr(exit), 0, 0, &p, no_timer);
        assert_eq!(error, 1);
        let mut error = 0;
        let exit =
            WriteMsrExit { error: &mut error, reason: MsrExitReason::Unknown, index: 1, data: 0 };
        handle_exit(VcpuExit::X86Wrmsr(exit), 0, 0, &p, no_timer);
        assert_eq!(error, 1);
    }

    #[test]
    fn a_triple_fault_ends_the_machine() {
        let p = peripherals(Default::default());
        let (_, action) = handle_exit(VcpuExit::Shutdown, 0, 0, &p, no_timer);
        assert_eq!(action, Action::End(Ending::TripleFault));
    }
}
