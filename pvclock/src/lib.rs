//! What time it is: the arithmetic and the state machines of a guest's clocks.
//!
//! Nothing here knows of KVM, threads or guest memory. TSC values, register
//! writes and the current reference time come in; clock readings, CPUID leaves,
//! effects for the VMM and "raise vector V" come out.
//!
//! - [`reference`]: the one line from TSC to time that every guest clock reads.
//! - [`latch`]: that line, readable from any thread or signal handler while it changes.
//! - [`tsc_page`]: that line, laid out for the guest.
//! - [`hyperv`]: CPUID leaves and MSRs.
//! - [`stimer`]: synthetic timers.
#![forbid(unsafe_code)]

pub mod hyperv;
pub mod latch;
pub mod reference;
pub mod stimer;
mod sync;
pub mod tsc_page;
