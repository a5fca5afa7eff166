//! The ways in which a machine ends, or does not.

use crate::{jobs, system};
use std::fs;
use std::time::Duration;

/// `poweroff`: through ACPI.
pub fn off() -> ! {
    end(libc::RB_POWER_OFF)
}

/// `reboot`: by the kernel's usual means.
pub fn reboot() -> ! {
    end(libc::RB_AUTOBOOT)
}

fn end(how: libc::c_int) -> ! {
    system::drain_console();
    // SAFETY: no memory is passed; there is no filesystem to lose.
    unsafe { libc::reboot(how) };
    // The machine ignored it, which is for the host's timeout to find.
    loop {
        std::thread::park();
    }
}

/// `crash`: a kernel panic.
///
/// # Errors
/// SysRq is not there.
pub fn crash() -> Result<(), String> {
    system::drain_console();
    fs::write("/proc/sysrq-trigger", "c").map_err(|e| format!("write /proc/sysrq-trigger: {e}"))
}

/// `hang`: spins for ever on every CPU.
pub fn hang() -> ! {
    for _ in system::cpus() {
        std::thread::spawn(|| {
            loop {
                std::hint::spin_loop();
            }
        });
    }
    loop {
        std::hint::spin_loop();
    }
}

/// `idle:SECONDS`: does nothing.
///
/// # Errors
/// An argument that is not a number.
pub fn idle(arguments: &[String]) -> Result<(), String> {
    std::thread::sleep(Duration::from_secs(jobs::number(arguments, 0, 1)?));
    Ok(())
}
