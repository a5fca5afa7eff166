//! The experiments.

pub mod bare;
pub mod lab;
pub mod progress;
pub mod resources;
