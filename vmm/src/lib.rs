//! The machine: the only crate of the VMM with unsafe code and KVM.
//!
//! [`machine`] builds and runs it; [`vcpu`] is the loop around KVM_RUN;
//! [`timeline`] is the one source of the guest's time.

#![warn(clippy::print_stderr)] // it panics where stderr takes nothing

pub mod acpi;
pub mod board;
pub mod boot;
pub mod boot_params;
pub mod cli;
pub mod console;
pub mod control;
pub mod control_socket;
pub mod cpuid;
pub mod crash;
pub mod discipline;
pub mod doctor;
pub mod ending;
pub mod error;
pub mod events;
pub mod histogram;
pub mod host;
pub mod host_cpus;
pub mod housekeeping;
pub mod hpet;
pub mod hyperv;
pub mod input;
pub mod irqchip;
pub mod lapic_timer;
pub mod layout;
pub mod lifecycle;
pub mod loader;
pub mod machine;
pub mod marks;
pub mod memory;
pub mod monitor;
pub mod msr_filter;
pub mod operator;
pub mod output_file;
pub mod overlay;
pub mod pause;
pub mod pinning;
pub mod probe;
pub mod registers;
pub mod seccomp;
pub mod serial_to;
pub mod signals;
pub mod stats;
pub mod stats_file;
pub mod terminal;
pub mod test_device;
pub mod timeline;
pub mod timer_line;
pub mod timers;
pub mod topology;
pub mod tsc;
pub mod vcpu;
