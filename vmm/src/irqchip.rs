//! KVM's interrupt controllers and PIT, wired as in a PC.

use crate::error::{Error, Result};
use crate::layout::{IDENTITY_MAP, IOAPIC_PINS, KVM_TSS, PIT_GSI};
use kvm_bindings::{
    KVM_CAP_X2APIC_API, KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER,
    KVM_IRQCHIP_PIC_SLAVE, KVM_PIT_SPEAKER_DUMMY, KVM_X2APIC_API_DISABLE_BROADCAST_QUIRK,
    KVM_X2APIC_API_USE_32BIT_IDS, KvmIrqRouting, kvm_enable_cap, kvm_irq_routing_entry,
    kvm_pit_config,
};
use kvm_ioctls::VmFd;

/// Highest APIC id that fits the 8 bits of xAPIC messages: 255 is everybody.
const MOST_XAPIC_ID: u32 = 254;

/// Creates both, and routes ISA interrupts; `most_id` is the highest APIC id.
pub fn create(vm: &VmFd, most_id: u32) -> Result<()> {
    let step = |what: &str, result: std::result::Result<(), kvm_ioctls::Error>| {
        result.map_err(|e| Error::new(format!("/dev/kvm: {what} fails ({e})")))
    };
    step("KVM_SET_TSS_ADDR", vm.set_tss_address(KVM_TSS))?;
    step("KVM_SET_IDENTITY_MAP_ADDR", vm.set_identity_map_address(IDENTITY_MAP))?;
    if most_id > MOST_XAPIC_ID {
        take_wide_ids(vm).map_err(|e| {
            Error::new(format!(
                "--cpus: APIC id {most_id} needs KVM_CAP_X2APIC_API, which this host's KVM does \
                 not have ({e}); ids up to {MOST_XAPIC_ID} work without it"
            ))
        })?;
    }
    step("KVM_CREATE_IRQCHIP", vm.create_irq_chip())?;
    let pit = kvm_pit_config { flags: KVM_PIT_SPEAKER_DUMMY, ..Default::default() };
    step("KVM_CREATE_PIT2", vm.create_pit2(pit))?;
    let table = KvmIrqRouting::from_entries(&routing())
        .map_err(|_| Error::new("/dev/kvm: the interrupt routes do not fit KVM's table"))?;
    step("KVM_SET_GSI_ROUTING", vm.set_gsi_routing(&table))
}

/// Makes ids 32 bits wide in local APIC state and MSIs, where the high 24 bits
/// then are in `address_hi`, and 255 the id of one vCPU instead of all (KVM API,
/// KVM_CAP_X2APIC_API).
fn take_wide_ids(vm: &VmFd) -> std::result::Result<(), kvm_ioctls::Error> {
    let flags = KVM_X2APIC_API_USE_32BIT_IDS | KVM_X2APIC_API_DISABLE_BROADCAST_QUIRK;
    let capability = kvm_enable_cap {
        cap: KVM_CAP_X2APIC_API,
        args: [flags.into(), 0, 0, 0],
        ..Default::default()
    };
    vm.enable_cap(&capability)
}

/// ISA interrupts to both PICs; every GSI to its I/O APIC pin, save that IRQ 0
/// is on pin 2, where PCs have the PIT and the HPET expects it (IA-PC HPET 1.0a
/// §2.3.5), and GSI 2 is nobody's.
fn routing() -> Vec<kvm_irq_routing_entry> {
    let entry = |gsi, irqchip, pin| {
        let mut entry =
            kvm_irq_routing_entry { gsi, type_: KVM_IRQ_ROUTING_IRQCHIP, ..Default::default() };
        entry.u.irqchip.irqchip = irqchip;
        entry.u.irqchip.pin = pin;
        entry
    };
    let master = (0..8).filter(|gsi| *gsi != 2).map(|gsi| entry(gsi, KVM_IRQCHIP_PIC_MASTER, gsi));
    let slave = (8..16).map(|gsi| entry(gsi, KVM_IRQCHIP_PIC_SLAVE, gsi - 8));
    let ioapic = (0..IOAPIC_PINS)
        .filter(|gsi| *gsi != PIT_GSI)
        .map(|gsi| entry(gsi, KVM_IRQCHIP_IOAPIC, if gsi == 0 { PIT_GSI } else { gsi }));
    master.chain(slave).chain(ioapic).collect()
}
