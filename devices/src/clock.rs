//! The single timeline of a VM.

/// Reference time since the VM's creation.
///
/// Implementations may be read by any thread at any time, so they must be cheap and lock-free.
/// Devices expect a clock that does not run backwards, and only lose accuracy, never their
/// footing, when it does.
pub trait Clock: Send + Sync {
    /// Now, in units of 10 ns since the VM was created: `now_10ns() / 10` equals the Hyper-V
    /// reference counter (100 ns units) read at the same moment.
    ///
    /// The clock must be read after every memory access before the call and before every one
    /// after it (`lfence; rdtsc; lfence`): lock-free readers look twice at a sequence number
    /// and rely on the clock having been read in between.
    fn now_10ns(&self) -> u64;
}
