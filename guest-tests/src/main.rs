//! The `clocklab` command: runs an experiment and prints its table.

use clap::{Parser, Subcommand};
use guest_tests::compare;
use guest_tests::experiment::{
    Common, bench, bringup, clock_cost, cyclictest, drift, hpet_contention, nmi_storm, order,
    start_up, timer_latency,
};
use guest_tests::report::Outputs;
use guest_tests::vm::VmError;
use std::process::ExitCode;

/// Measures the clocks that guests see.
#[derive(Debug, Parser)]
#[command(name = "clocklab", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    experiment: Experiment,
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    outputs: Outputs,
}

#[derive(Debug, Subcommand)]
enum Experiment {
    /// What one read of each clock costs: MSR against page, and the others
    ClockCost(clock_cost::Options),
    /// What many vCPUs that read one HPET get of it, by exits and from a page
    HpetContention(hpet_contention::Options),
    /// How long the kernel takes to bring its other CPUs up, serial and parallel
    Bringup(bringup::Options),
    /// What vmm adds before a guest runs: time beside the bare ioctls, and memory
    StartUp(start_up::Options),
    /// vmm beside a peer VMM and the bare loop: start, memory, exits, Linux's boot
    Bench(bench::Options),
    /// How late a timer's handler runs, by who serves the timer
    TimerLatency(timer_latency::Options),
    /// cyclictest in a Linux guest, by who serves its timers
    Cyclictest(cyclictest::Options),
    /// Clocks read from an NMI handler and from what it interrupts: does one go back?
    NmiStorm(nmi_storm::Options),
    /// Clocks read by one vCPU after the other: does one go back?
    Order(order::Options),
    /// How each clock drifts from the host's over minutes
    Drift(drift::Options),
    /// How two reports of one experiment differ: ratios with their spread
    Compare(compare::Options),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let report: Result<_, VmError> = match &cli.experiment {
        Experiment::ClockCost(options) => clock_cost::run(&cli.common, options),
        Experiment::HpetContention(options) => hpet_contention::run(&cli.common, options),
        Experiment::Bringup(options) => bringup::run(&cli.common, options),
        Experiment::StartUp(options) => start_up::run(&cli.common, options),
        Experiment::Bench(options) => bench::run(&cli.common, options),
        Experiment::TimerLatency(options) => timer_latency::run(&cli.common, options),
        Experiment::Cyclictest(options) => cyclictest::run(&cli.common, options),
        Experiment::NmiStorm(options) => nmi_storm::run(&cli.common, options),
        Experiment::Order(options) => order::run(&cli.common, options),
        Experiment::Drift(options) => drift::run(&cli.common, options),
        Experiment::Compare(options) => compare::run(options).map_err(VmError::Compare),
    };
    let delivered =
        report.map_err(|e| e.to_string()).and_then(|report| report.deliver(&cli.outputs));
    match delivered {
        Ok(()) => ExitCode::SUCCESS,
        Err(line) => {
            eprintln!("clocklab: {line}");
            ExitCode::FAILURE
        }
    }
}
