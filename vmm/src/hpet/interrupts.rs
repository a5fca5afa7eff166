//! The HPET's lines and messages, given to KVM's interrupt controllers.

use crate::layout::PIT_GSI;
use devices::hpet::Interrupts;
use kvm_bindings::{KVM_PIT_FLAGS_HPET_LEGACY, kvm_msi};
use kvm_ioctls::VmFd;
use std::sync::Arc;

/// What a message must address to be an interrupt (Intel SDM vol. 3, 11.11.1).
const MSI_BASE: u64 = 0xfee0_0000;
const MSI_MASK: u64 = 0xfff0_0000;

/// KVM's side of the HPET's interrupts. No call of these blocks.
pub struct KvmInterrupts {
    vm: Arc<VmFd>,
}

impl KvmInterrupts {
    /// For this VM, whose interrupt controllers exist.
    pub fn new(vm: Arc<VmFd>) -> Self {
        Self { vm }
    }
}

/// KVM's GSI of an I/O APIC pin. Pin 2 is the PIT's, together with the 8259's
/// IRQ 0, and both hang on GSI 0 (see [`crate::irqchip`]): the place that timer
/// 0 takes under legacy replacement.
fn gsi(pin: u32) -> u32 {
    if pin == PIT_GSI { 0 } else { pin }
}

impl Interrupts for KvmInterrupts {
    fn set_line(&self, pin: u32, level: bool) {
        // Fails for no line that `irqchip` has routed, and it has routed all.
        let _ = self.vm.set_irq_line(gsi(pin), level);
    }

    fn pulse(&self, pin: u32) {
        self.set_line(pin, true);
        self.set_line(pin, false);
    }

    fn msi(&self, address: u64, data: u32) {
        // Elsewhere a message is a write to memory, which this machine does not do.
        if address & MSI_MASK == MSI_BASE {
            let message = kvm_msi { address_lo: address as u32, data, ..Default::default() };
            // A guest may name an APIC that is not there: the message is lost, as on a board.
            let _ = self.vm.signal_msi(message);
        }
    }

    fn legacy_replacement(&self, on: bool) {
        // KVM's PIT then counts without raising its line. (The RTC has no line.) A guest that
        // sets the PIT on another vCPU at this moment may find its write undone.
        if let Ok(mut pit) = self.vm.get_pit2() {
            pit.flags &= !KVM_PIT_FLAGS_HPET_LEGACY;
            pit.flags |= if on { KVM_PIT_FLAGS_HPET_LEGACY } else { 0 };
            let _ = self.vm.set_pit2(&pit);
        }
    }
}
