//! The host's KVM: opening it, and what kind it is.

use crate::error::{Error, Result};
use kvm_ioctls::{Cap, Kvm};
use serde::Serialize;
use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader};

/// What runs the guest's instructions; every figure carries it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum HostKind {
    /// VMX or SVM in silicon.
    Hardware,
    /// KVM without VMX or SVM: ring 0 of the guest is interpreted.
    Software,
    /// VMX or SVM that itself is emulated or offered by a hypervisor.
    Nested,
}

impl fmt::Display for HostKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            HostKind::Hardware => "hardware KVM",
            HostKind::Software => "software KVM",
            HostKind::Nested => "nested KVM",
        })
    }
}

impl HostKind {
    /// Tells from the flags line of `/proc/cpuinfo`.
    pub fn from_cpu_flags(flags: &str) -> Self {
        let has = |name| flags.split_whitespace().any(|flag| flag == name);
        match (has("vmx") || has("svm"), has("hypervisor")) {
            (false, _) => HostKind::Software,
            (true, false) => HostKind::Hardware,
            (true, true) => HostKind::Nested,
        }
    }

    /// The kind of this host.
    pub fn detect() -> Self {
        // Not the whole file, which tells of every CPU: the first is enough.
        let lines = File::open("/proc/cpuinfo").map(|file| BufReader::new(file).lines());
        let flags = lines.ok().and_then(|lines| {
            lines.map_while(io::Result::ok).find(|line| line.starts_with("flags"))
        });
        Self::from_cpu_flags(&flags.unwrap_or_default())
    }
}

/// The processor's model, from the text of `/proc/cpuinfo`.
pub fn cpu_model(cpuinfo: &str) -> &str {
    cpuinfo
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "))
        .map_or("unknown", |(_, model)| model.trim())
}

/// Opens /dev/kvm.
///
/// # Errors
/// One line for each way in which it can be out of reach.
pub fn open_kvm() -> Result<Kvm> {
    const API_VERSION: i32 = 12;
    let kvm = Kvm::new().map_err(|e| {
        Error::new(match e.errno() {
            libc::ENOENT => {
                "/dev/kvm: does not exist; load kvm_intel or kvm_amd, or turn on virtualisation \
                 in the firmware"
                    .to_string()
            }
            libc::EACCES | libc::EPERM => {
                "/dev/kvm: no permission; add this user to the group kvm".to_string()
            }
            _ => format!("/dev/kvm: cannot be opened ({e})"),
        })
    })?;
    let version = kvm.get_api_version();
    if version != API_VERSION {
        return Err(Error::new(format!("/dev/kvm: speaks API {version}, not {API_VERSION}")));
    }
    for (cap, name) in [
        (Cap::Irqchip, "an in-kernel interrupt controller"),
        (Cap::UserMemory, "user memory"),
        (Cap::ImmediateExit, "immediate exit"),
        (Cap::Pit2, "an in-kernel PIT"),
    ] {
        if !kvm.check_extension(cap) {
            return Err(Error::new(format!("/dev/kvm: this host's KVM lacks {name}")));
        }
    }
    Ok(kvm)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kind_follows_from_the_flags() {
        assert_eq!(HostKind::from_cpu_flags("flags : fpu svm"), HostKind::Hardware);
        assert_eq!(HostKind::from_cpu_flags("flags : fpu vmx hypervisor"), HostKind::Nested);
        assert_eq!(HostKind::from_cpu_flags("flags : fpu vmxnet hypervisor"), HostKind::Software);
    }
}
