//! The atomics of the lock-free parts: loom's under `--cfg loom`, so that a model
//! test sees every interleaving, the standard library's otherwise.

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU64, Ordering, fence};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU64, Ordering, fence};
