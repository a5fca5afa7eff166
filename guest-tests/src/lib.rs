//! The experiments, and what they run on.
//!
//! Each module of [`experiment`] plans its VMs, runs them through [`vm`] (directly
//! or in the [`lab`]) and reduces what they print to the rows of a [`report`].

pub mod bare;
pub mod compare;
pub mod control;
pub mod experiment;
pub mod host;
pub mod lab;
pub mod progress;
pub mod report;
pub mod resources;
pub mod results;
pub mod vm;
