//! The monitor: a few words about the machine, and a few things to do to it.

use crate::ending::Ending;
use crate::lifecycle::State;
use crate::machine::Shared;
use crate::stats;
use kvm_bindings::kvm_msi;
use kvm_ioctls::VmFd;
use std::fmt::Write;
use std::sync::Arc;

/// What follows from a command.
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    /// Show this and wait for the next command.
    Say(String),
    /// The monitor is done.
    Close,
}

const HELP: &str = "\
status      whether the guest runs
stats       exits so far, by reason
pause       stop all vCPUs
resume      let them go on
nmi         send an NMI to every vCPU
quit        end the machine (as Ctrl-A x)
close       close the monitor (as Ctrl-A c)
";

/// Acts on a machine.
pub struct Monitor {
    shared: Arc<Shared>,
    vm: Arc<VmFd>,
}

impl Monitor {
    /// For this machine.
    pub fn new(shared: Arc<Shared>, vm: Arc<VmFd>) -> Self {
        Self { shared, vm }
    }

    /// Ends the machine.
    pub fn quit(&self) {
        self.shared.lifecycle.end(Ending::Quit);
    }

    /// Runs one command line.
    pub fn execute(&self, line: &str) -> Next {
        let lifecycle = &self.shared.lifecycle;
        Next::Say(match line.trim() {
            "" => String::new(),
            "help" | "h" | "?" => HELP.into(),
            "status" => self.status(),
            "stats" => self.stats(),
            "pause" => {
                lifecycle.pause();
                self.status()
            }
            "resume" => {
                lifecycle.resume();
                self.status()
            }
            "nmi" => self.nmi(),
            "close" | "exit" => return Next::Close,
            "quit" => {
                self.quit();
                return Next::Close;
            }
            other => format!("{other}: no such command; help lists them"),
        })
    }

    fn status(&self) -> String {
        let state = match self.shared.lifecycle.state() {
            State::Running => "running",
            State::Paused => "paused",
            State::Ending => "ending",
        };
        let vcpus = self.shared.stats.len();
        let seconds = self.shared.timeline.now().0 as f64 / 1e7;
        format!("{state}; {vcpus} vCPUs; reference time {seconds:.3} s")
    }

    fn stats(&self) -> String {
        let mut text = String::new();
        for (reason, count) in stats::totals(self.shared.stats.iter()) {
            // A String takes everything.
            let _ = writeln!(text, "{reason:<12} {count}");
        }
        text
    }

    /// As a message that every local APIC hears: destination "all", delivery mode
    /// NMI (SDM vol. 3, "Message Address Register Format").
    fn nmi(&self) -> String {
        const ADDRESS: u32 = 0xfee0_0000;
        const EVERYBODY: u32 = 0xff << 12;
        const NMI: u32 = 0b100 << 8;
        let message = kvm_msi { address_lo: ADDRESS | EVERYBODY, data: NMI, ..Default::default() };
        match self.vm.signal_msi(message) {
            Ok(_) => "sent".into(),
            Err(e) => format!("KVM does not deliver it ({e})"),
        }
    }
}
