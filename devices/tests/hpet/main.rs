//! The HPET against its specification: named cases, a reference model, and threads.

mod bench;
mod conformance;
mod contention;
mod model;
mod properties;
