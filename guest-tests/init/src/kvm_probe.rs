//! Whether this machine's KVM is there and makes VMs.

use crate::report::Result as Report;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

const KVM_GET_API_VERSION: libc::Ioctl = 0xAE00_u32 as libc::Ioctl;
const KVM_CREATE_VM: libc::Ioctl = 0xAE01_u32 as libc::Ioctl;
const KVM_CREATE_VCPU: libc::Ioctl = 0xAE41_u32 as libc::Ioctl;

/// `kvm-probe`: opens /dev/kvm and creates a VM with one vCPU.
///
/// # Errors
/// The first step that fails.
pub fn run() -> Result<(), String> {
    let kvm = File::options()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .map_err(|e| format!("open /dev/kvm: {e}"))?;
    let version = call(kvm.as_raw_fd(), KVM_GET_API_VERSION, "KVM_GET_API_VERSION")?;
    let vm = call(kvm.as_raw_fd(), KVM_CREATE_VM, "KVM_CREATE_VM")?;
    call(vm, KVM_CREATE_VCPU, "KVM_CREATE_VCPU")?;
    Report::of("kvm-probe").count("api_version", version.unsigned_abs().into()).print();
    Ok(())
}

/// An ioctl whose argument is 0. The descriptors it makes live until the process
/// ends, which is soon.
fn call(fd: libc::c_int, request: libc::Ioctl, name: &str) -> Result<libc::c_int, String> {
    // SAFETY: none of the three requests reads or writes memory of ours.
    match unsafe { libc::ioctl(fd, request, 0) } {
        -1 => Err(format!("{name}: {}", io::Error::last_os_error())),
        value => Ok(value),
    }
}
