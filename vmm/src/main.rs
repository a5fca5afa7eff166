//! The `vmm` command: reads its arguments, runs a machine, and tells by its exit
//! code how that ended. The guest's console is stdout's; our words are stderr's.

#![warn(clippy::print_stderr)] // it panics where stderr takes nothing

use std::io::Write;
use std::process::exit;
use vmm::cli::{self, Cli, Command, Refusal};
use vmm::crash;
use vmm::doctor;
use vmm::ending::Ending;
use vmm::error::{Result, tell};
use vmm::machine::Machine;
use vmm::marks::Marks;
use vmm::signals;

fn main() {
    let marks = Marks::start();
    crash::prepare();
    signals::exit_at_once();
    let cli = match cli::parse(std::env::args_os()) {
        Ok(cli) => cli,
        Err(Refusal::Help(text)) => {
            let _ = text.print();
            exit(0);
        }
        Err(Refusal::Wrong(line)) => refuse(&line.to_string()),
    };
    start_log(cli.verbose);
    match &cli.command {
        Some(Command::Doctor { json }) => print_findings(*json),
        None => match run(&cli, marks) {
            Ok(ending) => {
                if ending.is_failure() {
                    tell(format_args!("vmm: {ending}\n"));
                } else {
                    log::info!("{ending}");
                }
                exit(ending.code());
            }
            Err(line) => refuse(&line.to_string()),
        },
    }
}

fn run(cli: &Cli, marks: Marks) -> Result<Ending> {
    cli::check(&cli.run)?;
    Machine::build(&cli.run, marks)?.run(&cli.run)
}

fn print_findings(json: bool) {
    let findings = doctor::examine();
    let text = if json {
        serde_json::to_string_pretty(&findings).unwrap_or_default() + "\n"
    } else {
        findings.to_text()
    };
    // A closed pipe is the reader's wish.
    let _ = std::io::stdout().write_all(text.as_bytes());
}

fn refuse(line: &str) -> ! {
    tell(format_args!("vmm: {line}\n"));
    exit(Ending::Refused(String::new()).code());
}

fn start_log(verbose: u8) {
    let level = match verbose {
        0 => log::LevelFilter::Warn,
        1 => log::LevelFilter::Info,
        2 => log::LevelFilter::Debug,
        _ => log::LevelFilter::Trace,
    };
    env_logger::Builder::new()
        .filter_level(level)
        .format(|out, record| writeln!(out, "vmm: {}", record.args()))
        .init();
}
