//! The experiments.

pub mod bare;
pub mod lab;
