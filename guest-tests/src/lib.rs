//! The experiments.

pub mod bare;
