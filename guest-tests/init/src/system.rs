//! The parts of a Linux machine that an /init sets up or asks for.

use std::ffi::CString;
use std::fs;
use std::io;

/// Mounts the kernel's own filesystems; returns what failed.
pub fn mount_all() -> Vec<String> {
    let mounts = [
        ("proc", "/proc"),
        ("sysfs", "/sys"),
        ("devtmpfs", "/dev"),
        ("tmpfs", "/dev/shm"),
        ("tmpfs", "/tmp"),
    ];
    mounts
        .into_iter()
        .filter_map(|(kind, path)| mount(kind, path).err().map(|e| format!("mount {path}: {e}")))
        .collect()
}

fn mount(kind: &str, path: &str) -> io::Result<()> {
    fs::create_dir_all(path)?;
    let (kind, path) = (CString::new(kind)?, CString::new(path)?);
    // SAFETY: three NUL-terminated strings that outlive the call; no data argument.
    let failed =
        unsafe { libc::mount(kind.as_ptr(), path.as_ptr(), kind.as_ptr(), 0, std::ptr::null()) };
    match failed {
        0 => Ok(()),
        // The kernel mounts devtmpfs itself when it is configured to.
        _ => Err(io::Error::last_os_error()).or_else(|e| match e.raw_os_error() {
            Some(libc::EBUSY) => Ok(()),
            _ => Err(e),
        }),
    }
}

/// Keeps kernel messages from cutting result lines in two: they stay in the log,
/// for the `dmesg` job. A command line that sets a level is obeyed.
pub fn quieten_console(cmdline: &str) {
    let asked = |word: &str| {
        ["loglevel=", "debug", "ignore_loglevel"].iter().any(|prefix| word.starts_with(prefix))
    };
    if !cmdline.split_whitespace().any(asked) {
        const SYSLOG_ACTION_CONSOLE_LEVEL: libc::c_int = 8;
        // SAFETY: this action takes no buffer; the length is the level.
        unsafe { libc::klogctl(SYSLOG_ACTION_CONSOLE_LEVEL, std::ptr::null_mut(), 1) };
    }
}

/// The CPUs that this process may run on, in order.
pub fn cpus() -> Vec<usize> {
    // Larger than cpu_set_t's 1 024 CPUs: the kernel refuses a set that is too small.
    let mut mask = [0_u64; 128];
    // SAFETY: the kernel writes at most the length given, into an array of that length.
    let bytes = unsafe {
        libc::syscall(libc::SYS_sched_getaffinity, 0, size_of_val(&mask), mask.as_mut_ptr())
    };
    let known = usize::try_from(bytes).unwrap_or(0) * 8;
    (0..known).filter(|cpu| mask[cpu / 64] >> (cpu % 64) & 1 == 1).collect()
}

/// Keeps the calling thread on one CPU.
///
/// # Errors
/// The CPU that is not there.
pub fn pin(cpu: usize) -> Result<(), String> {
    let mut mask = [0_u64; 128];
    mask[cpu / 64] = 1 << (cpu % 64);
    // SAFETY: the kernel reads the length given, from an array of that length.
    let failed =
        unsafe { libc::syscall(libc::SYS_sched_setaffinity, 0, size_of_val(&mask), mask.as_ptr()) };
    match failed {
        0 => Ok(()),
        _ => Err(format!("pin to CPU {cpu}: {}", io::Error::last_os_error())),
    }
}

/// A clock's time in ns, the way user programs read it: through the vDSO where
/// the current clocksource has one, else by system call.
#[inline]
pub fn clock_ns(clock: libc::clockid_t) -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid timespec; the clock ids used here always exist.
    unsafe { libc::clock_gettime(clock, &raw mut time) };
    (time.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(time.tv_nsec as u64)
}

/// Waits until the console has taken every byte.
pub fn drain_console() {
    // SAFETY: fails harmlessly where standard output is not a terminal.
    unsafe { libc::tcdrain(libc::STDOUT_FILENO) };
}

/// Reads a file of sysfs or procfs without its last newline.
///
/// # Errors
/// The path and the reason.
pub fn read(path: &str) -> Result<String, String> {
    fs::read_to_string(path)
        .map(|text| text.trim_end().to_owned())
        .map_err(|e| format!("read {path}: {e}"))
}
