//! What can be done to a running machine from outside, whoever asks.

use crate::ending::Ending;
use crate::lifecycle::State;
use crate::machine::Shared;
use crate::stats;
use crate::timeline::MOST_OFF_PPB;
use crate::topology::Topology;
use kvm_bindings::kvm_msi;
use kvm_ioctls::VmFd;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::sync::Arc;

/// A command, as JSON: `{"command":"nmi","cpu":1}`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "lowercase", deny_unknown_fields)]
pub enum Command {
    /// Stop the vCPUs and reference time.
    Pause {},
    /// Let both go on.
    Resume {},
    /// Tell the state and the time.
    Status {},
    /// Tell the exits so far.
    Stats {},
    /// Send an NMI.
    Nmi {
        /// Number of the vCPU.
        cpu: u32,
    },
    /// Publish the TSC page anew: another sequence, the same time.
    Republish {},
    /// Change the rate of reference time by at most 100 ppb a command.
    Slew {
        /// Wanted difference from the rate that the TSC's nominal frequency gives,
        /// in parts per 10⁹; positive: faster.
        ppb: i32,
    },
    /// End the machine.
    Quit {},
}

/// Acts on a machine.
#[derive(Clone)]
pub struct Control {
    shared: Arc<Shared>,
    vm: Arc<VmFd>,
    topology: Topology,
}

impl Control {
    /// For this machine.
    pub fn new(shared: Arc<Shared>, vm: Arc<VmFd>, topology: Topology) -> Self {
        Self { shared, vm, topology }
    }

    /// Does what `command` says and returns what there is to tell.
    ///
    /// # Errors
    /// One line: a value that this machine cannot take, or what KVM refuses.
    pub fn execute(&self, command: Command) -> Result<Value, String> {
        let shared = &self.shared;
        match command {
            Command::Pause {} => shared.pause(),
            Command::Resume {} => shared.resume(),
            Command::Status {} => {}
            Command::Stats {} => return Ok(self.stats()),
            Command::Nmi { cpu } => return self.nmi(cpu),
            Command::Republish {} => {
                shared.change_clock(|| {});
                return Ok(json!({}));
            }
            Command::Slew { ppb } => return self.slew(ppb),
            Command::Quit {} => shared.lifecycle.end(Ending::Quit),
        }
        Ok(self.status())
    }

    fn status(&self) -> Value {
        let timeline = &self.shared.timeline;
        json!({
            "state": match self.shared.lifecycle.state() {
                State::Starting => "starting",
                State::Running => "running",
                State::Paused => "paused",
                State::Ending => "ending",
            },
            "vcpus": self.shared.stats.len(),
            "reference_100ns": timeline.now().0,
            "tsc_hz": timeline.clock().tsc_hz(),
            "nominal_tsc_hz": timeline.nominal_hz(),
        })
    }

    fn stats(&self) -> Value {
        let Shared { stats, peripherals, timeline, .. } = &*self.shared;
        let vcpus: Vec<_> = stats.iter().collect();
        let (ports, mmio) = (peripherals.ports.names(), peripherals.mmio.names());
        json!(stats::gather(&vcpus, ports, mmio, timeline.nominal_hz()))
    }

    /// As a message to the vCPU's local APIC, delivery mode NMI (Intel SDM vol. 3,
    /// "Message Data Register Format"). KVM_NMI would wait for the vCPU to leave
    /// KVM_RUN, which a halted one does not do.
    fn nmi(&self, cpu: u32) -> Result<Value, String> {
        const ADDRESS: u32 = 0xfee0_0000;
        const NMI: u32 = 0b100 << 8;
        let cpus = self.shared.stats.len();
        if cpu as usize >= cpus {
            return Err(format!("nmi: there is no vCPU {cpu}: they are 0 to {}", cpus - 1));
        }
        let id = self.topology.apic_id(cpu);
        let message = kvm_msi {
            address_lo: ADDRESS | (id & 0xff) << 12,
            // KVM_CAP_X2APIC_API: where the rest of an id goes.
            address_hi: id & !0xff,
            data: NMI,
            ..Default::default()
        };
        match self.vm.signal_msi(message) {
            Ok(_) => Ok(json!({})),
            Err(e) => Err(format!("nmi: KVM does not deliver it ({e})")),
        }
    }

    fn slew(&self, ppb: i32) -> Result<Value, String> {
        if u64::from(ppb.unsigned_abs()) > MOST_OFF_PPB {
            return Err(format!("slew: {ppb} ppb is out of bounds: at most {MOST_OFF_PPB}"));
        }
        let timeline = &self.shared.timeline;
        let nominal = timeline.nominal_hz();
        // A clock that counts a slower TSC than there is runs fast.
        let wanted = nominal as f64 / (1.0 + f64::from(ppb) * 1e-9);
        let hz = self.shared.change_clock(|| timeline.steer(wanted.round() as u64));
        let reached = (nominal as f64 / hz as f64 - 1.0) * 1e9;
        Ok(json!({"ppb": reached.round()}))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_read_strictly() {
        let read = |text| serde_json::from_str::<Command>(text).map_err(|e| e.to_string());
        assert_eq!(read(r#"{"command":"pause"}"#), Ok(Command::Pause {}));
        assert_eq!(read(r#"{"command":"nmi","cpu":3}"#), Ok(Command::Nmi { cpu: 3 }));
        assert_eq!(read(r#"{"command":"slew","ppb":-50}"#), Ok(Command::Slew { ppb: -50 }));
        for wrong in [
            r#"{"command":"nmi"}"#,
            r#"{"command":"nmi","cpu":-1}"#,
            r#"{"command":"pause","cpu":1}"#,
            r#"{"command":"explode"}"#,
            r#""pause""#,
            "",
        ] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }
}
