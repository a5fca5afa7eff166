//! A VM that is acted on through its control socket while it runs.

use crate::control::{self, Begin, Driven};
use crate::vm::{Outcome, Vm, VmError};
use std::io;
use std::time::Duration;
use vmm::control::Command;

/// Runs `vm` to its power-off, sending it `round` again and again.
///
/// # Errors
/// A guest that does not power off, or a command that `vmm` refuses. In the lab the
/// socket is out of reach.
pub fn run(mut vm: Vm, begin: Begin, round: &[Command]) -> Result<(Outcome, Driven), VmError> {
    if vm.in_lab {
        let why = "needs this machine's /dev/kvm: the lab's control socket is out of reach";
        return Err(VmError::Host(vm.name, io::Error::other(why)));
    }
    let host = |e| VmError::Host("control socket".into(), e);
    let (_directory, socket) = control::place().map_err(host)?;
    vm.arguments.extend(["--control".into(), socket.to_string_lossy().into_owned()]);
    let patience = Duration::from_secs(30);
    let (outcome, driven) = std::thread::scope(|scope| {
        let driver = scope.spawn(|| control::drive(&socket, patience, begin, round));
        let outcome = vm.run_to_poweroff();
        (outcome, driver.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    });
    // What the machine says of its end explains why the driver failed.
    let outcome = outcome?;
    let driven = driven.map_err(|line| host(io::Error::other(line)))?;
    Ok((outcome, driven))
}
