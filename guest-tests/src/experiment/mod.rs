//! The experiments: one module each, with the same three steps: plan the VMs, run
//! them, reduce what they printed to rows.

pub mod bench;
pub mod bringup;
pub mod clock_cost;
pub mod contention_model;
pub mod cyclictest;
pub mod drift;
mod driven;
pub mod hpet_contention;
mod linux_start;
pub mod nmi_storm;
pub mod order;
pub mod start_up;
pub mod timer_latency;

use crate::progress::Progress;
use crate::vm::{Guest, LabChoice, Outcome, Vm, VmError};
use std::path::PathBuf;
use std::time::Duration;

/// What all experiments are told.
#[derive(Debug, Clone, clap::Args)]
pub struct Common {
    /// Run guests in the lab: where this machine's KVM cannot, always, or never
    #[arg(long, value_enum, default_value_t = LabChoice::Auto, global = true)]
    pub lab: LabChoice,
    /// Pass one more argument to every `vmm`; may be repeated
    #[arg(long, value_name = "ARG", global = true, allow_hyphen_values = true)]
    pub vmm_arg: Vec<String>,
}

impl Common {
    /// A VM of a bare-metal guest program.
    ///
    /// # Errors
    /// The program has not been built.
    pub fn bare(&self, program: &str, arguments: &[&str]) -> Result<Vm, VmError> {
        let mut all = vec!["--kernel".to_owned(), program.to_owned()];
        all.extend(arguments.iter().map(ToString::to_string));
        all.extend(self.vmm_arg.iter().cloned());
        Ok(Vm {
            name: program.to_owned(),
            arguments: all,
            files: vec![(program.to_owned(), crate::vm::sibling(program)?)],
            timeout: Duration::from_secs(120),
            in_lab: self.lab.in_lab(Guest::Bare),
            shadow_paging: false,
        })
    }

    /// A VM of a Linux guest whose init runs `jobs`; `files` as
    /// [`crate::vm::linux_files`] gives them.
    #[must_use]
    pub fn linux(
        &self,
        name: &str,
        jobs: &str,
        files: &[(String, PathBuf)],
        arguments: &[&str],
    ) -> Vm {
        self.linux_with(name, jobs, "", files, arguments)
    }

    /// The same with more words on the kernel's command line.
    #[must_use]
    pub fn linux_with(
        &self,
        name: &str,
        jobs: &str,
        words: &str,
        files: &[(String, PathBuf)],
        arguments: &[&str],
    ) -> Vm {
        let cmdline = format!("console=ttyS0 quiet panic=-1 {words} \"run={jobs}\"");
        let fixed = ["--kernel", "bzImage", "--initrd", "initrd", "--cmdline", &cmdline];
        let mut all: Vec<String> = fixed.iter().chain(arguments).map(ToString::to_string).collect();
        all.extend(self.vmm_arg.iter().cloned());
        Vm {
            name: name.to_owned(),
            arguments: all,
            files: files.to_vec(),
            timeout: Duration::from_secs(300),
            in_lab: self.lab.in_lab(Guest::Linux),
            shadow_paging: false,
        }
    }

    /// A VM of a 32-bit Linux guest; `files` as [`crate::vm::linux32_files`] gives
    /// them.
    #[must_use]
    pub fn linux32(&self, name: &str, files: &[(String, PathBuf)], arguments: &[&str]) -> Vm {
        Vm { shadow_paging: true, ..self.linux(name, "clock-cost", files, arguments) }
    }
}

/// Runs VMs two at a time, and takes only guests that power themselves off.
///
/// # Errors
/// The first VM that does not.
pub fn run_all(vms: &[Vm]) -> Result<Vec<Outcome>, VmError> {
    let mut outcomes = Vec::with_capacity(vms.len());
    for pair in vms.chunks(2) {
        // Labs do not disturb each other's counts; figures from hardware do.
        if pair.iter().all(|vm| vm.in_lab) {
            let ran: Vec<_> = std::thread::scope(|scope| {
                let runs: Vec<_> =
                    pair.iter().map(|vm| scope.spawn(|| vm.run_to_poweroff())).collect();
                runs.into_iter().map(std::thread::ScopedJoinHandle::join).collect()
            });
            for outcome in ran {
                outcomes.push(outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?);
            }
        } else {
            for vm in pair {
                outcomes.push(vm.run_to_poweroff()?);
            }
        }
    }
    Ok(outcomes)
}

/// The files of Linux guests, with progress told.
///
/// # Errors
/// See [`crate::vm::linux_files`].
pub fn linux_files() -> Result<Vec<(String, PathBuf)>, VmError> {
    // Programs first built by more than one VM at once would only wait for each other.
    crate::vm::linux_files(&mut Progress::new(true))
}
