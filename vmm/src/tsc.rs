//! The host's time-stamp counter.

/// Reads the host's TSC, after everything before it in program order.
pub fn read_ordered() -> u64 {
    // SAFETY: LFENCE and RDTSC exist on every x86-64 processor, touch no memory
    // and fault only where CR4.TSD is set, which Linux does not do.
    unsafe {
        core::arch::x86_64::_mm_lfence();
        core::arch::x86_64::_rdtsc()
    }
}

/// Reads the host's TSC without ordering it: for durations long beside a
/// reorder window.
pub fn read() -> u64 {
    // SAFETY: as in `read_ordered`.
    unsafe { core::arch::x86_64::_rdtsc() }
}
