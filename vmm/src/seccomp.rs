//! What each thread may ask of the host's kernel once the guest runs.
//!
//! The guest is the adversary: should it take a thread over, that thread can do
//! what is listed here and no more. No list opens a file, makes a socket or a
//! process, or maps memory that can be executed. A call that is not listed ends the
//! process with a line that names it ([`crate::crash`]).
//!
//! Speculative store bypass stays as the host has it (SPEC_ALLOW): kernels before
//! 5.16 would otherwise turn it off for filtered threads, guests included, and
//! every figure measured there would be another one.

use crate::error::{Error, Result};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen as Length, SeccompCmpOp as Compare,
    SeccompCondition as Condition, SeccompFilter, SeccompRule as Rule, TargetArch,
};
use std::collections::BTreeMap;
use std::sync::OnceLock;

/// Kinds of threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Thread {
    /// The main loop: events, input, control, the end.
    Main,
    /// A vCPU.
    Vcpu,
    /// Copies the console's ring to its output.
    Console,
    /// Serves timers: a housekeeping CPU's or the HPET's.
    Timers,
}

/// Every thread: memory, locks, time, telling, ending, and giving the terminal back.
const ALL: &[libc::c_long] = &[
    libc::SYS_brk,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_close,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_futex,
    libc::SYS_getpgrp,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_gettid,
    libc::SYS_gettimeofday,
    libc::SYS_madvise,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_nanosleep,
    libc::SYS_poll,
    libc::SYS_restart_syscall,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_sigaltstack,
    libc::SYS_time,
    libc::SYS_write,
];

/// The main loop: its descriptors, and the control socket's clients.
const MAIN: &[libc::c_long] = &[
    libc::SYS_accept4,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_wait,
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_recvfrom,
    libc::SYS_sendto,
    libc::SYS_shutdown,
    libc::SYS_timerfd_settime,
    libc::SYS_unlink,
    libc::SYS_writev,
];

const fn allowed(thread: Thread) -> &'static [libc::c_long] {
    match thread {
        Thread::Main => MAIN,
        Thread::Timers | Thread::Vcpu | Thread::Console => &[],
    }
}

/// One condition: argument `index`, cut to what `mask` covers, is `value`.
fn argument(index: u8, mask: u64, value: u64) -> Result<Rule> {
    Condition::new(index, Length::Dword, Compare::MaskedEq(mask), value)
        .and_then(|condition| Rule::new(vec![condition]))
        .map_err(unusable)
}

fn unusable(e: impl std::fmt::Display) -> Error {
    Error::new(format!("seccomp: the lists do not compile ({e}); --no-seccomp runs without"))
}

/// Calls that are allowed with some arguments only.
fn conditional(thread: Thread) -> Result<Vec<(libc::c_long, Vec<Rule>)>> {
    /// An ioctl's type, in its second byte: that of KVM's.
    const KVM_TYPE: u64 = (kvm_bindings::KVMIO as u64) << 8;
    const WHOLE: u64 = u32::MAX as u64;
    let exactly = |index, value: u64| argument(index, WHOLE, value);

    let mut ioctls =
        vec![exactly(1, libc::TCGETS)?, exactly(1, libc::TCSETS)?, exactly(1, libc::TIOCGPGRP)?];
    if thread != Thread::Console {
        ioctls.push(argument(1, 0xff00, KVM_TYPE)?);
    }
    if thread == Thread::Main {
        ioctls.push(exactly(1, libc::FIONBIO)?);
    }
    let not_executable = || argument(2, libc::PROT_EXEC as u64, 0);
    // SAFETY: getpid has no precondition.
    let ourselves = unsafe { libc::getpid() } as u64;
    let mut calls = vec![
        // Debug builds of std check a descriptor before they close it.
        (libc::SYS_fcntl, vec![exactly(1, libc::F_GETFD as u64)?]),
        (libc::SYS_ioctl, ioctls),
        (libc::SYS_mmap, vec![not_executable()?]),
        (libc::SYS_mprotect, vec![not_executable()?]),
        // To stop vCPUs.
        (libc::SYS_tgkill, vec![exactly(0, ourselves)?]),
    ];
    match thread {
        // To stop ourselves when the terminal asks for it.
        Thread::Main => calls.push((libc::SYS_kill, vec![exactly(0, ourselves)?])),
        Thread::Timers => {
            calls.push((libc::SYS_prctl, vec![exactly(0, libc::PR_SET_TIMERSLACK as u64)?]));
        }
        Thread::Vcpu | Thread::Console => {}
    }
    Ok(calls)
}

fn compile(thread: Thread) -> Result<BpfProgram> {
    let mut rules: BTreeMap<libc::c_long, Vec<Rule>> =
        ALL.iter().chain(allowed(thread)).map(|call| (*call, vec![])).collect();
    rules.extend(conditional(thread)?);
    SeccompFilter::new(rules, SeccompAction::Trap, SeccompAction::Allow, TargetArch::x86_64)
        .and_then(BpfProgram::try_from)
        .map_err(unusable)
}

#[derive(Debug)]
struct Programs {
    main: BpfProgram,
    vcpu: BpfProgram,
    console: BpfProgram,
    timers: BpfProgram,
}

/// Nothing is in it with `--no-seccomp`.
static PROGRAMS: OnceLock<Programs> = OnceLock::new();

/// From here on, [`enter`] confines threads.
///
/// # Errors
/// A host whose kernel has no seccomp filters.
pub fn turn_on() -> Result<()> {
    let trap: u32 = libc::SECCOMP_RET_TRAP;
    // SAFETY: the call reads one word, which lives.
    let available = unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_GET_ACTION_AVAIL, 0, &raw const trap)
    };
    if available != 0 {
        let e = std::io::Error::last_os_error();
        return Err(Error::new(format!(
            "seccomp: the host's kernel has no filters ({e}); --no-seccomp runs without"
        )));
    }
    let programs = Programs {
        main: compile(Thread::Main)?,
        vcpu: compile(Thread::Vcpu)?,
        console: compile(Thread::Console)?,
        timers: compile(Thread::Timers)?,
    };
    PROGRAMS.get_or_init(|| programs);
    Ok(())
}

/// Confines the calling thread for the rest of its life; does nothing unless
/// [`turn_on`] was called.
///
/// # Panics
/// Where the kernel takes no filter although it said that it would: better no
/// thread than a free one.
pub fn enter(thread: Thread) {
    let Some(programs) = PROGRAMS.get() else { return };
    let program = match thread {
        Thread::Main => &programs.main,
        Thread::Vcpu => &programs.vcpu,
        Thread::Console => &programs.console,
        Thread::Timers => &programs.timers,
    };
    let filter = libc::sock_fprog {
        len: program.len() as libc::c_ushort,
        // The kernel reads it only.
        filter: program.as_ptr().cast_mut().cast(),
    };
    // SAFETY: `filter` describes a live program in the layout of `sock_filter`,
    // which seccompiler's instruction has too (both are C's); prctl reads numbers.
    let entered = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::syscall(
                libc::SYS_seccomp,
                libc::SECCOMP_SET_MODE_FILTER,
                libc::SECCOMP_FILTER_FLAG_SPEC_ALLOW,
                &raw const filter,
            ) == 0
    };
    assert!(entered, "seccomp takes no filter: {}", std::io::Error::last_os_error());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lists_compile_and_stay_short() {
        for thread in [Thread::Main, Thread::Vcpu, Thread::Console, Thread::Timers] {
            let length = compile(thread).unwrap().len();
            assert!(length < 400, "{thread:?}: {length} instructions");
        }
    }
}
