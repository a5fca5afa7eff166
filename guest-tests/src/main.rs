//! The `clocklab` command: runs an experiment and prints its table.

use clap::{Parser, Subcommand};
use guest_tests::experiment::{Common, clock_cost, cyclictest, timer_latency};
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
    /// How late a timer's handler runs, by who serves the timer
    TimerLatency(timer_latency::Options),
    /// cyclictest in a Linux guest, by who serves its timers
    Cyclictest(cyclictest::Options),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let report: Result<_, VmError> = match cli.experiment {
        Experiment::ClockCost => clock_cost::run(&cli.common),
        Experiment::Cyclictest(options) => cyclictest::run(&cli.common, &options),
        Experiment::TimerLatency(options) => timer_latency::run(&cli.common, &options),
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
