//! The `clocklab` command: runs an experiment and prints its table.

use clap::{Parser, Subcommand};
use guest_tests::compare;
use guest_tests::experiment::{
    Common, bringup, clock_cost, hpet_contention, start_up, timer_latency,
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
    ClockCost,
    /// What many vCPUs that read one HPET get of it, by exits and from a page
    HpetContention(hpet_contention::Options),
    /// How long the kernel takes to bring its other CPUs up, serial and parallel
    Bringup(bringup::Options),
    /// What vmm adds before a guest runs: time beside the bare ioctls, and memory
    StartUp(start_up::Options),
    /// How late a timer's handler runs, by who serves the timer
    TimerLatency(timer_latency::Options),
    /// How two reports of one experiment differ: ratios with their spread
    Compare(compare::Options),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let report: Result<_, VmError> = match &cli.experiment {
        Experiment::ClockCost => clock_cost::run(&cli.common),
        Experiment::HpetContention(options) => hpet_contention::run(&cli.common, options),
        Experiment::Bringup(options) => bringup::run(&cli.common, options),
        Experiment::StartUp(options) => start_up::run(&cli.common, options),
        Experiment::TimerLatency(options) => timer_latency::run(&cli.common, options),
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
