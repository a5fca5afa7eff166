//! What a vCPU starts with: registers, MSRs, local APIC pins.

use crate::layout::{GDT, HOLE_END, PAGE_TABLES};
use crate::memory::GuestMemory;
use kvm_bindings::{
    Msrs, kvm_fpu, kvm_lapic_state, kvm_msr_entry, kvm_regs, kvm_segment, kvm_sregs,
};
use kvm_ioctls::VcpuFd;
use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

/// Why a vCPU could not be set up: the step's name and KVM's answer.
pub type SetupError = (&'static str, kvm_ioctls::Error);

const CR0_PE: u64 = 1;
const CR0_ET: u64 = 1 << 4;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;
/// Selectors that the 64-bit boot protocol asks for: `__BOOT_CS`, `__BOOT_DS`.
const BOOT_CS: u16 = 0x10;
const BOOT_DS: u16 = 0x18;

const MSR_IA32_MISC_ENABLE: u32 = 0x1a0;
const MISC_ENABLE_FAST_STRING: u64 = 1;
const MSR_MTRR_DEF_TYPE: u32 = 0x2ff;
/// MTRRs on (bit 11), everything write-back (6): the guest maps MMIO uncached
/// by its own page tables.
const MTRR_ENABLED_WRITE_BACK: u64 = 1 << 11 | 6;

/// Local vector table entries of the register page (Intel SDM 3A §11.5.1).
const LVT_LINT0: usize = 0x350;
const LVT_LINT1: usize = 0x360;
const DELIVER_NMI: u32 = 4 << 8;
const DELIVER_EXTINT: u32 = 7 << 8;

/// Where and how the boot vCPU starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    /// 64-bit mode on identity page tables (boot.rst "64-bit Boot Protocol").
    Long64 {
        /// First instruction, guest-physical.
        rip: u64,
        /// The zero page.
        rsi: u64,
    },
    /// Flat 32-bit protected mode without paging: boot.rst "32-bit Boot Protocol", the PVH
    /// start-of-day state, Multiboot 0.6.96 §3.2. They differ in registers alone.
    Protected32 {
        /// First instruction, guest-physical.
        eip: u32,
        /// Multiboot's magic number.
        eax: u32,
        /// PVH's start info, or Multiboot's information.
        ebx: u32,
        /// Linux's zero page.
        esi: u32,
    },
}

/// Writes the descriptor table of the boot vCPU, and its page tables if `entry` wants any.
pub fn write_tables(memory: &GuestMemory, entry: Entry) -> Result<(), GuestMemoryError> {
    let code = match entry {
        Entry::Long64 { .. } => 0xa09b,
        Entry::Protected32 { .. } => 0xc09b,
    };
    let gdt: [u64; 4] = [0, 0, descriptor(code), descriptor(0xc093)];
    for (i, entry) in (0..).zip(gdt) {
        memory.write_obj(entry, GuestAddress(GDT + 8 * i))?;
    }
    match entry {
        Entry::Long64 { .. } => write_page_tables(memory),
        Entry::Protected32 { .. } => Ok(()),
    }
}

/// Maps the first 4 GiB one to one.
fn write_page_tables(memory: &GuestMemory) -> Result<(), GuestMemoryError> {
    const PRESENT_WRITABLE: u64 = 3;
    const HUGE: u64 = 1 << 7;
    let (pml4, pdpt, pd) = (PAGE_TABLES, PAGE_TABLES + 0x1000, PAGE_TABLES + 0x2000);
    memory.write_obj(pdpt | PRESENT_WRITABLE, GuestAddress(pml4))?;
    for gib in 0..HOLE_END >> 30 {
        memory.write_obj((pd + 0x1000 * gib) | PRESENT_WRITABLE, GuestAddress(pdpt + 8 * gib))?;
    }
    for page in 0..HOLE_END >> 21 {
        let entry = page << 21 | PRESENT_WRITABLE | HUGE;
        memory.write_obj(entry, GuestAddress(pd + 8 * page))?;
    }
    Ok(())
}

/// A flat 4 GiB segment descriptor with the given access and flag bits.
fn descriptor(flags: u64) -> u64 {
    (flags & 0xf000) << 40 | 0xf << 48 | (flags & 0xff) << 40 | 0xffff
}

fn flat_segment(selector: u16, type_: u8, long: bool) -> kvm_segment {
    kvm_segment {
        base: 0,
        limit: 0xffff_ffff,
        selector,
        type_,
        present: 1,
        s: 1,
        db: u8::from(!long),
        l: u8::from(long),
        g: 1,
        ..Default::default()
    }
}

/// Puts the boot vCPU at `entry`, interrupts off.
pub fn set_boot_state(vcpu: &VcpuFd, entry: Entry) -> Result<(), SetupError> {
    let regs = match entry {
        Entry::Long64 { rip, rsi } => kvm_regs { rip, rsi, ..Default::default() },
        Entry::Protected32 { eip, eax, ebx, esi } => kvm_regs {
            rip: eip.into(),
            rax: eax.into(),
            rbx: ebx.into(),
            rsi: esi.into(),
            ..Default::default()
        },
    };
    let regs = kvm_regs { rflags: 2, ..regs };
    vcpu.set_regs(&regs).map_err(|e| ("KVM_SET_REGS", e))?;
    let mut sregs: kvm_sregs = vcpu.get_sregs().map_err(|e| ("KVM_GET_SREGS", e))?;
    let long = matches!(entry, Entry::Long64 { .. });
    sregs.gdt.base = GDT;
    sregs.gdt.limit = 31;
    sregs.idt.base = 0;
    sregs.idt.limit = 0;
    sregs.cs = flat_segment(BOOT_CS, 0xb, long);
    let data = flat_segment(BOOT_DS, 0x3, false);
    (sregs.ds, sregs.es, sregs.ss, sregs.fs, sregs.gs) = (data, data, data, data, data);
    if long {
        sregs.cr0 = CR0_PE | CR0_ET | CR0_PG;
        sregs.cr3 = PAGE_TABLES;
        sregs.cr4 = CR4_PAE;
        sregs.efer = EFER_LME | EFER_LMA;
    } else {
        // PVH: a busy 32-bit TSS at 0 with limit 0x67.
        sregs.tr = kvm_segment { limit: 0x67, type_: 0xb, present: 1, s: 0, ..Default::default() };
        sregs.cr0 = CR0_PE | CR0_ET;
        sregs.cr4 = 0;
        sregs.efer = 0;
    }
    vcpu.set_sregs(&sregs).map_err(|e| ("KVM_SET_SREGS", e))
}

/// Sets what firmware would have set on every vCPU.
pub fn set_common_state(vcpu: &VcpuFd) -> Result<(), SetupError> {
    let fpu = kvm_fpu { fcw: 0x37f, mxcsr: 0x1f80, ..Default::default() };
    vcpu.set_fpu(&fpu).map_err(|e| ("KVM_SET_FPU", e))?;
    for (index, data) in [
        (MSR_IA32_MISC_ENABLE, MISC_ENABLE_FAST_STRING),
        (MSR_MTRR_DEF_TYPE, MTRR_ENABLED_WRITE_BACK),
    ] {
        let entry = kvm_msr_entry { index, data, ..Default::default() };
        let Ok(msrs) = Msrs::from_entries(&[entry]) else { continue };
        // One at a time, and a refusal is no error: software KVM lacks some of
        // these, and a guest that finds them absent copes.
        match vcpu.set_msrs(&msrs) {
            Ok(1) => {}
            _ => log::debug!("this host's KVM does not take MSR {index:#x}"),
        }
    }
    let mut lapic: kvm_lapic_state = vcpu.get_lapic().map_err(|e| ("KVM_GET_LAPIC", e))?;
    set_delivery(&mut lapic, LVT_LINT0, DELIVER_EXTINT);
    set_delivery(&mut lapic, LVT_LINT1, DELIVER_NMI);
    vcpu.set_lapic(&lapic).map_err(|e| ("KVM_SET_LAPIC", e))
}

/// Reads a 32-bit register of a local APIC page.
pub fn lapic_register(lapic: &kvm_lapic_state, offset: usize) -> u32 {
    let mut bytes = [0; 4];
    for (byte, register) in bytes.iter_mut().zip(&lapic.regs[offset..]) {
        *byte = *register as u8;
    }
    u32::from_le_bytes(bytes)
}

/// Turns the local APIC on with its timer in TSC-deadline mode, as a guest would.
pub fn set_deadline_timer(vcpu: &VcpuFd) -> Result<(), SetupError> {
    const SPURIOUS: usize = 0xf0;
    const ENABLE: u32 = 1 << 8;
    const LVT_TIMER: usize = 0x320;
    const TSC_DEADLINE: u32 = 2 << 17;
    let mut lapic = vcpu.get_lapic().map_err(|e| ("KVM_GET_LAPIC", e))?;
    set_lapic_register(&mut lapic, SPURIOUS, ENABLE | 0xff);
    set_lapic_register(&mut lapic, LVT_TIMER, TSC_DEADLINE | 0x40);
    vcpu.set_lapic(&lapic).map_err(|e| ("KVM_SET_LAPIC", e))
}

/// Writes a 32-bit register of a local APIC page.
fn set_lapic_register(lapic: &mut kvm_lapic_state, offset: usize, value: u32) {
    for (register, byte) in lapic.regs[offset..].iter_mut().zip(value.to_le_bytes()) {
        *register = byte as _;
    }
}

/// Sets the delivery mode and clears the mask of one local vector.
fn set_delivery(lapic: &mut kvm_lapic_state, offset: usize, mode: u32) {
    let value = lapic_register(lapic, offset) & !(7 << 8 | 1 << 16) | mode;
    set_lapic_register(lapic, offset, value);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_flat() {
        assert_eq!(descriptor(0xa09b), 0x00af_9b00_0000_ffff);
        assert_eq!(descriptor(0xc093), 0x00cf_9300_0000_ffff);
        assert_eq!(descriptor(0xc09b), 0x00cf_9b00_0000_ffff);
    }

    #[test]
    fn the_identity_map_reaches_4_gib() {
        let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        write_tables(&memory, Entry::Long64 { rip: 0, rsi: 0 }).unwrap();
        let last: u64 = memory.read_obj(GuestAddress(PAGE_TABLES + 0x2000 + 8 * 2047)).unwrap();
        assert_eq!(last, 0xffe0_0000 | 0x83);
    }

    #[test]
    fn a_local_vector_keeps_its_other_bits() {
        let mut lapic = kvm_lapic_state::default();
        lapic.regs[LVT_LINT0] = 0x20;
        lapic.regs[LVT_LINT0 + 2] = 1;
        set_delivery(&mut lapic, LVT_LINT0, DELIVER_EXTINT);
        assert_eq!(lapic_register(&lapic, LVT_LINT0), 0x720);
    }
}
