//! The experiments.

pub mod lab;
