//! When this program itself fails: the terminal is given back, one line says what
//! happened, and the exit code tells. No thread dies alone.

use crate::ending::Ending;
use crate::terminal;
use std::backtrace::{Backtrace, BacktraceStatus};
use std::io::Write;
use std::panic::PanicHookInfo;
use std::ptr;

const FATAL: [(libc::c_int, &str); 6] = [
    (libc::SIGSEGV, "SIGSEGV"),
    (libc::SIGBUS, "SIGBUS"),
    (libc::SIGILL, "SIGILL"),
    (libc::SIGFPE, "SIGFPE"),
    (libc::SIGABRT, "SIGABRT"),
    (libc::SIGSYS, "SIGSYS"),
];

/// Prepares for panics, fatal signals and system calls that seccomp forbids.
pub fn prepare() {
    std::panic::set_hook(Box::new(on_panic));
    for (signal, _) in FATAL {
        // SAFETY: `sigaction` is plain data; the handler calls only what a handler
        // may, on the alternate stack that every thread of std has.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_fatal_signal as Handler as libc::sighandler_t;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESETHAND;
            libc::sigaction(signal, &raw const action, ptr::null_mut());
        }
    }
}

fn code() -> libc::c_int {
    Ending::VmmFailure(String::new()).code()
}

/// The one line about a panic.
fn panic_line(info: &PanicHookInfo<'_>) -> String {
    let payload = info.payload();
    let what = payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
        .replace('\n', " ");
    let thread = std::thread::current();
    let thread = thread.name().unwrap_or("unnamed");
    let place = info.location().map_or("an unknown place".into(), ToString::to_string);
    format!("vmm: a defect of this program: thread {thread} panicked at {place}: {what}")
}

fn on_panic(info: &PanicHookInfo<'_>) {
    terminal::restore();
    let mut stderr = std::io::stderr();
    let _ = writeln!(stderr, "{}", panic_line(info));
    let trace = Backtrace::capture();
    if trace.status() == BacktraceStatus::Captured {
        let _ = writeln!(stderr, "{trace}");
    }
    // SAFETY: ends the process without running anything that could panic again.
    unsafe { libc::_exit(code()) }
}

type Handler = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);

extern "C" fn on_fatal_signal(
    number: libc::c_int,
    info: *mut libc::siginfo_t,
    _: *mut libc::c_void,
) {
    /// `si_code` of a call that a seccomp filter traps (siginfo.h).
    const SYS_SECCOMP: libc::c_int = 1;
    /// Offset of `si_syscall` in the structure (sigaction(2)): after the three
    /// words at the front, four bytes of padding and the call's address.
    const SI_SYSCALL: usize = 24;

    terminal::restore();
    let name = FATAL.iter().find(|(signal, _)| *signal == number).map_or("signal", |(_, n)| n);
    // SAFETY: the kernel gives a valid structure to a handler with SA_SIGINFO, in
    // which the call's number is present when `si_code` says so.
    let syscall = unsafe {
        (number == libc::SIGSYS && (*info).si_code == SYS_SECCOMP)
            .then(|| info.byte_add(SI_SYSCALL).cast::<libc::c_int>().read())
    };
    let mut line = Line { bytes: [0; 160], length: 0 };
    // A line without allocation: `fmt` writes into the array.
    let _ = match syscall {
        Some(n) => writeln!(
            line,
            "vmm: a defect of this program: seccomp does not allow it system call {n}; \
             --no-seccomp runs without"
        ),
        None => writeln!(line, "vmm: a defect of this program: {name}"),
    };
    // SAFETY: write(2), raise(3) and _exit(2) are what a handler may call; the
    // buffer is live and its length is right.
    unsafe {
        libc::write(libc::STDERR_FILENO, line.bytes.as_ptr().cast(), line.length);
        libc::_exit(code());
    }
}

/// A line in a fixed buffer; what does not fit is left out.
struct Line {
    bytes: [u8; 160],
    length: usize,
}

impl Write for Line {
    fn write(&mut self, text: &[u8]) -> std::io::Result<usize> {
        let taken = text.len().min(self.bytes.len() - self.length);
        self.bytes[self.length..self.length + taken].copy_from_slice(&text[..taken]);
        self.length += taken;
        Ok(taken)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
