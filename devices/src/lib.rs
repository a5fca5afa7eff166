//! What the guest can poke.
//!
//! Every device takes its clock, its timer and its interrupt line as parameters and is driven
//! through [`bus::Device`] by several vCPU threads at once. No device reads the host's clock, and
//! nothing that a guest writes panics, loops or allocates without a bound.
#![forbid(unsafe_code)]

pub mod bus;
pub mod clock;
pub mod deadlines;
pub mod debug_exit;
pub mod hpet;
pub mod i8042;
pub mod marks;
pub mod pm;
pub mod pvpanic;
pub mod rtc;
pub mod serial;
mod sync;
pub mod test_device;
pub mod testing;

/// Something that a device asks for: an interrupt, a reset, a power-off, attention.
///
/// Called on the vCPU's thread, never under a device's lock; it must not block.
pub type Signal = Box<dyn Fn() + Send + Sync>;
