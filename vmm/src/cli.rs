//! The command line.

use crate::error::{Error, Result};
use crate::host_cpus::CpuList;
use crate::loader::Boot;
use crate::memory::Backing;
use crate::pinning::Pinning;
use crate::serial_to::SerialTo;
use crate::topology::Topology;
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// Boots a kernel under KVM with the clock of your choice.
#[derive(Debug, Parser)]
#[command(name = "vmm", version, max_term_width = 100, args_conflicts_with_subcommands = true)]
#[command(disable_help_flag = true)]
pub struct Cli {
    /// What to do instead of booting.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// What to boot.
    #[command(flatten)]
    pub run: RunOptions,
    /// Say more on stderr: -v what is done, -vv every detail
    #[arg(short, long, action = clap::ArgAction::Count, global = true)]
    pub verbose: u8,
    /// Print this help
    #[arg(short, long, action = clap::ArgAction::HelpShort, global = true)]
    help: Option<bool>,
}

/// What to do instead of booting.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Measure what this host can do
    Doctor {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

/// A machine, as the command line describes it.
#[derive(Debug, Clone, Args)]
pub struct RunOptions {
    /// bzImage, vmlinux, or ELF with a PVH note or Multiboot header
    #[arg(short, long, value_name = "FILE")]
    pub kernel: Option<PathBuf>,
    /// Initial RAM disk, or a Multiboot kernel's module
    #[arg(short, long, value_name = "FILE")]
    pub initrd: Option<PathBuf>,
    /// Command line [default: console=ttyS0; Multiboot: none]
    #[arg(long, alias = "append", value_name = "TEXT")]
    pub cmdline: Option<String>,
    /// Unpack a bzImage here (payload) or there (setup)
    #[arg(long, hide_possible_values = true, value_name = "WHO", value_enum, default_value_t = Boot::Auto)]
    pub boot: Boot,
    /// Number of vCPUs [default: as --topology has it, else 1]
    #[arg(short, long, value_name = "N", allow_negative_numbers = true)]
    pub cpus: Option<u32>,
    /// sockets=S,cores=C,threads=T [default: one socket of cores]
    #[arg(long, value_name = "LAYOUT")]
    pub topology: Option<Topology>,
    /// Guest memory: a number with K, M or G; M if bare
    #[arg(short, long, value_name = "SIZE", default_value = "512M", value_parser = memory_size, allow_negative_numbers = true)]
    pub memory: u64,
    /// Back guest memory with huge pages of 2M or 1G (bare: 2M)
    #[arg(long, hide_possible_values = true, value_name = "SIZE", num_args = 0..=1, require_equals = true,
          default_missing_value = "2M")]
    pub hugepages: Option<HugePages>,
    /// Touch all guest memory before the start
    #[arg(long)]
    pub prefault: bool,
    /// Lock guest memory, so that it is never paged out
    #[arg(long)]
    pub mlock: bool,
    /// Give the guest the Hyper-V reference TSC page and counter
    #[arg(long)]
    pub hv_tsc_page: bool,
    /// Give the guest the reference counter MSR without the page
    #[arg(long)]
    pub hv_ref_counter: bool,
    /// Whose Hyper-V clock: ours (user) or KVM's (kernel)
    #[arg(long, hide_possible_values = true, value_name = "WHO", value_enum, default_value_t = HvImpl::Auto)]
    pub hv_impl: HvImpl,
    /// HPET: off, reads are exits (exit), or of a page (page)
    #[arg(long, hide_possible_values = true, value_name = "HOW", value_enum, default_value_t = HpetMode::Exit)]
    pub hpet: HpetMode,
    /// Timers of the HPET, 3 to 32
    #[arg(long, value_name = "N", default_value_t = 3,
        value_parser = clap::value_parser!(u8).range(3..=32))]
    pub hpet_timers: u8,
    /// Store the HPET page's counter every NS ns; 0: always
    #[arg(long, value_name = "NS", default_value_t = 0,
        value_parser = clap::value_parser!(u64).range(..=1_000_000_000))]
    pub hpet_page_period: u64,
    /// Serial port: stdio, none, file=PATH or pty
    #[arg(long, value_name = "TO", default_value = "stdio")]
    pub serial: SerialTo,
    /// Give the guest Hyper-V synthetic timers (and the TSC page)
    #[arg(long)]
    pub hv_stimer: bool,
    /// TSC-deadline timer: KVM's (kernel) or ours (offload)
    #[arg(long, hide_possible_values = true, value_name = "WHO", value_enum, default_value_t = LapicTimer::Kernel)]
    pub lapic_timer: LapicTimer,
    /// CPUs whose threads fire timers [default: those left by --pin]
    #[arg(long, value_name = "CPUS")]
    pub housekeeping: Option<CpuList>,
    /// vCPUs' own CPUs: VCPU=CPU,… or a list, used in order
    #[arg(long, value_name = "CPUS")]
    pub pin: Option<Pinning>,
    /// SCHED_FIFO priority of vCPU threads; timer threads have one more
    #[arg(long, value_name = "1-98", allow_negative_numbers = true, value_parser = clap::value_parser!(u8).range(1..=98))]
    pub rt_prio: Option<u8>,
    /// Microseconds that housekeeping spins before a deadline
    #[arg(long, value_name = "US", default_value_t = 0, allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(..=1_000_000))]
    pub hk_poll: u32,
    /// End the guest after this many seconds (exit code 36)
    #[arg(long, value_name = "SECS", value_parser = seconds, allow_negative_numbers = true)]
    pub timeout: Option<Duration>,
    /// Ports of a unit test's device; its exit code N is our N<<1|1
    #[arg(long)]
    pub debug_exit: bool,
    /// Write exit counts and times there as JSON
    #[arg(long, value_name = "FILE")]
    pub stats: Option<PathBuf>,
    /// Take commands there, one JSON object a line
    #[arg(long, value_name = "SOCKET")]
    pub control: Option<PathBuf>,
    /// Let every thread call all of the host's kernel
    #[arg(long)]
    pub no_seccomp: bool,
    /// Refine the reference clock's rate in the background
    #[arg(long, value_name = "ON|OFF", value_enum, default_value_t = Switch::On, hide_possible_values = true)]
    pub clock_discipline: Switch,
    /// Tell on stderr when each step of the start was reached
    #[arg(long)]
    pub boot_timer: bool,
}

/// Sizes of huge pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum HugePages {
    /// 2 MiB.
    #[value(name = "2M")]
    TwoMib,
    /// 1 GiB.
    #[value(name = "1G")]
    OneGib,
}

impl HugePages {
    /// Size in bytes.
    pub fn bytes(self) -> u64 {
        match self {
            Self::TwoMib => 2 << 20,
            Self::OneGib => 1 << 30,
        }
    }
}

impl fmt::Display for HugePages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::TwoMib => "2M",
            Self::OneGib => "1G",
        })
    }
}

/// On or off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    /// Do it.
    On,
    /// Leave it.
    Off,
}

/// Who serves the Hyper-V clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum HvImpl {
    /// This program.
    User,
    /// The host's KVM.
    Kernel,
    /// `user`.
    Auto,
}

/// Whether there is an HPET, and what a read of it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum HpetMode {
    /// No HPET.
    Off,
    /// A read is an exit.
    Exit,
    /// A read is a read of memory, which a busy thread keeps up to date.
    Page,
}

/// Who serves the local APIC's timer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LapicTimer {
    /// KVM.
    Kernel,
    /// Housekeeping threads, in TSC-deadline mode.
    Offload,
}

impl RunOptions {
    /// How the host is to hold the guest's memory.
    pub fn backing(&self) -> Backing {
        Backing { huge_pages: self.hugepages, prefault: self.prefault, lock: self.mlock }
    }

    /// The vCPUs, and how they are grouped.
    ///
    /// # Errors
    /// No vCPU, or a `--topology` that has another number of them than `--cpus`.
    pub fn topology(&self) -> Result<Topology> {
        match (self.cpus, self.topology) {
            (Some(0), _) => Err(Error::new("--cpus 0: a machine has at least one vCPU")),
            (Some(cpus), Some(t)) if t.cpus() != u64::from(cpus) => Err(Error::new(format!(
                "--cpus {cpus}: --topology {t} makes {}; leave one of the two out",
                t.cpus()
            ))),
            (_, Some(topology)) => Ok(topology),
            (cpus, None) => Ok(Topology::one_socket(cpus.unwrap_or(1))),
        }
    }

    /// Whether any Hyper-V interface is shown to the guest.
    pub fn hyperv(&self) -> bool {
        self.tsc_page() || self.hv_ref_counter
    }

    /// Whether the guest is shown the reference TSC page: stimers count by it.
    pub fn tsc_page(&self) -> bool {
        self.hv_tsc_page || self.hv_stimer
    }
}

/// Reads a size in bytes from a number with an optional K, M or G; M if bare.
fn memory_size(text: &str) -> std::result::Result<u64, String> {
    let (number, shift) = match text.char_indices().last() {
        Some((at, 'K' | 'k')) => (&text[..at], 10),
        Some((at, 'M' | 'm')) => (&text[..at], 20),
        Some((at, 'G' | 'g')) => (&text[..at], 30),
        _ => (text, 20),
    };
    let number: u64 = number.parse().map_err(|_| "write a number with K, M or G, as in 512M")?;
    number.checked_mul(1 << shift).ok_or_else(|| "no machine has that much memory".into())
}

/// Reads a duration above zero that a timer of the host takes.
fn seconds(text: &str) -> std::result::Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "write a number of seconds")?;
    Duration::try_from_secs_f64(seconds)
        .ok()
        .filter(|d| !d.is_zero() && i64::try_from(d.as_secs()).is_ok())
        .ok_or_else(|| "write a number of seconds above 0 and below 2^63".into())
}

/// Reads the command line.
///
/// # Errors
/// What clap finds wrong, as one line; its own `--help` and `--version` are
/// returned as text to print.
pub fn parse<I>(arguments: I) -> std::result::Result<Cli, Refusal>
where
    I: IntoIterator<Item = std::ffi::OsString>,
{
    Cli::try_parse_from(arguments).map_err(|e| {
        if e.use_stderr() {
            Refusal::Wrong(one_line(&e.render().to_string()))
        } else {
            Refusal::Help(e)
        }
    })
}

/// A command line that does not start a machine.
#[derive(Debug)]
pub enum Refusal {
    /// Text that was asked for.
    Help(clap::Error),
    /// What is wrong with it.
    Wrong(Error),
}

/// Folds clap's paragraphs into the one line that matters.
fn one_line(text: &str) -> Error {
    let text = text.strip_prefix("error: ").unwrap_or(text);
    let lines: Vec<_> = text
        .lines()
        .map(str::trim)
        .take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more"))
        .filter(|line| !line.is_empty())
        .collect();
    Error::new(lines.join(" "))
}

/// Splits what must hold between arguments from what one argument says.
pub fn check(options: &RunOptions) -> Result<()> {
    if options.kernel.is_none() {
        return Err(Error::new("--kernel: give the kernel to boot"));
    }
    if options.hpet_page_period != 0 && options.hpet != HpetMode::Page {
        return Err(Error::new("--hpet-page-period: needs --hpet page"));
    }
    options.topology().map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_definition_is_consistent_and_the_help_fits_a_screen() {
        Cli::command().debug_assert();
        let help = Cli::command().render_help().to_string();
        assert!(help.lines().count() <= 50, "{help}");
    }

    #[test]
    fn every_flag_is_in_the_table_of_flags() {
        let table = include_str!("../../docs/flags.md");
        for argument in Cli::command().get_arguments() {
            let flag = format!("--{}", argument.get_long().unwrap_or_default());
            let row = |line: &str| line.starts_with("| `") && line.contains(&flag);
            assert!(table.lines().any(row), "{flag}");
        }
    }

    #[test]
    fn sizes() {
        assert_eq!(memory_size("512M"), Ok(512 << 20));
        assert_eq!(memory_size("512"), Ok(512 << 20));
        assert_eq!(memory_size("3g"), Ok(3 << 30));
        assert_eq!(memory_size("4096K"), Ok(4 << 20));
        for bad in ["", "M", "-1", "1.5G", "99999999999999999999", "18446744073709551615G", "1T"] {
            assert!(memory_size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_wrong_command_line_is_one_line() {
        for arguments in [
            vec!["vmm", "--cpus", "many"],
            vec!["vmm", "--memory", "99999999999G"],
            vec!["vmm", "--no-such-flag"],
            vec!["vmm", "--timeout", "0"],
            vec!["vmm", "--timeout", "1e19"],
            vec!["vmm", "--hv-impl", "magic"],
            vec!["vmm", "--hpet-timers", "2"],
            vec!["vmm", "--hpet-timers", "33"],
            vec!["vmm", "--hpet-page-period", "1000000001"],
        ] {
            let flag = arguments[1];
            match parse(arguments.iter().map(Into::into)) {
                Err(Refusal::Wrong(line)) => {
                    let line = line.to_string();
                    assert!(!line.contains('\n') && line.contains(flag), "{line}");
                }
                other => panic!("{other:?}"),
            }
        }
    }
}
