//! Boots one ELF64 guest under the bare loop: `bare-loop --kernel target/release/guest-clock-cost`.
//! Ends with `vmm`'s exit status: 0 power-off, 33 triple fault, 35 bad input, 37 KVM gave up, 40 reset
//! by the keyboard controller.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use guest_tests::bare::{BareConfig, BareEnd, run};

#[derive(Parser)]
#[command(about = "The floor for benchmarks: nothing but KVM_RUN and the clocks' answers")]
struct Options {
    /// ELF64 guest image
    #[arg(short, long)]
    kernel: PathBuf,
    /// Guest command line
    #[arg(long, default_value = "")]
    cmdline: String,
    /// Number of vCPUs
    #[arg(short, long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    cpus: u32,
    /// Guest RAM in MiB
    #[arg(short, long, default_value_t = 128, value_parser = clap::value_parser!(u64).range(16..=3072))]
    memory: u64,
    /// Print on stderr how long it took to create and start the vCPUs
    #[arg(long)]
    timing: bool,
}

fn main() -> ExitCode {
    let options = Options::parse();
    let config = BareConfig {
        kernel: options.kernel,
        cmdline: options.cmdline,
        cpus: options.cpus,
        memory_mib: options.memory,
    };
    let mut console = std::io::LineWriter::new(std::io::stdout());
    let complain = |why: &dyn std::fmt::Display| {
        let _ = writeln!(std::io::stderr(), "bare-loop: {why}");
    };
    let run = match run(&config, &mut console) {
        Ok(run) => run,
        Err(why) => {
            complain(&why);
            return ExitCode::from(35);
        }
    };
    if options.timing
        && let Some(started) = run.vcpus_started
    {
        complain(&format_args!("vcpus_started_ns={}", started.as_nanos()));
    }
    match run.end {
        BareEnd::PowerOff => ExitCode::from(0),
        BareEnd::Reboot => ExitCode::from(40),
        BareEnd::Shutdown => ExitCode::from(33),
        BareEnd::Broken(why) => {
            complain(&why);
            ExitCode::from(37)
        }
    }
}
