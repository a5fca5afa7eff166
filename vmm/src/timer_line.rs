//! What a vCPU's timer needs: the thread that waits for it, and the way to its vCPU.

use crate::housekeeping::Slot;
use kvm_bindings::kvm_msi;
use kvm_ioctls::VmFd;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Raises an interrupt vector; called under the timer's lock.
pub type Raise = Box<dyn Fn(u8) + Send + Sync>;

/// The wires of one vCPU's timers.
pub struct TimerLine {
    /// Where deadlines are published.
    pub slot: Slot,
    /// What happens when one comes due.
    pub raise: Raise,
}

impl fmt::Debug for TimerLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TimerLine").field("slot", &self.slot).finish_non_exhaustive()
    }
}

impl TimerLine {
    /// Raises vectors in the local APIC with this x2APIC id, without a stop at the
    /// vCPU's thread.
    pub fn to_apic(slot: Slot, vm: Arc<VmFd>, apic_id: u32) -> Self {
        let refused = AtomicBool::new(false);
        let raise = move |vector| {
            // 0 is no failure: the vector was pending already, or the guest has
            // switched its APIC off.
            if let Err(e) = vm.signal_msi(message(apic_id, vector))
                && !refused.swap(true, Ordering::Relaxed)
            {
                log::error!("KVM does not deliver vector {vector} to APIC {apic_id:#x} ({e})");
            }
        };
        Self { slot, raise: Box::new(raise) }
    }
}

/// A fixed, edge-triggered interrupt for one APIC in physical mode (Intel SDM 3A
/// §11.11). Ids above 255 have their upper bits in the address's upper half, where
/// KVM looks for them under KVM_CAP_X2APIC_API (KVM API §4.71).
fn message(apic_id: u32, vector: u8) -> kvm_msi {
    const BASE: u32 = 0xfee0_0000;
    kvm_msi {
        address_lo: BASE | (apic_id & 0xff) << 12,
        address_hi: apic_id & !0xff,
        data: vector.into(),
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_apic_id_is_split_over_the_address() {
        let at = |id| {
            let kvm_msi { address_lo, address_hi, data, .. } = message(id, 0xed);
            assert_eq!(data, 0xed);
            (address_lo, address_hi)
        };
        assert_eq!(at(0), (0xfee0_0000, 0));
        assert_eq!(at(0xfe), (0xfeef_e000, 0));
        assert_eq!(at(0x1ff), (0xfeef_f000, 0x100));
    }
}
