//! `lab`: runs one command line in the lab. `resources/lab` calls it.

use clap::Parser;
use guest_tests::lab::{Lab, Port};
use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Runs one command in an emulated machine with KVM; exits with its status, or
/// 125 where the lab itself failed.
///
/// The command is given to /bin/sh in the directory of the files, where `vmm` is
/// too. What it writes to out/ comes back to --out.
#[derive(Parser)]
#[command(name = "lab")]
struct Arguments {
    /// Longest time from the machine's start to its end
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    timeout: u64,
    /// RAM of the emulated machine
    #[arg(long, value_name = "MIB", default_value_t = 3072)]
    memory: u32,
    /// A file to have inside, under NAME
    #[arg(long = "file", value_name = "NAME=PATH", value_parser = named_file)]
    files: Vec<(String, PathBuf)>,
    /// Where to put the files that the command left in out/
    #[arg(long, value_name = "DIRECTORY")]
    out: Option<PathBuf>,
    /// Let the machine's clocks count its instructions, 1 ns each, not this host's time
    #[arg(long)]
    virtual_time: bool,
    /// Let KVM shadow guests' page tables: 32-bit guests with PAE need it
    #[arg(long)]
    shadow_paging: bool,
    /// No progress on standard error
    #[arg(long)]
    quiet: bool,
    /// The command line
    #[arg(last = true, required = true)]
    command: Vec<String>,
}

fn named_file(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once('=') {
        Some((name, path)) if !name.is_empty() => Ok((name.to_owned(), path.into())),
        _ => Err("give NAME=PATH".into()),
    }
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(status) => ExitCode::from(u8::try_from(status).unwrap_or(255)),
        Err(failure) => {
            eprintln!("{failure}");
            ExitCode::from(125)
        }
    }
}

fn run(arguments: &Arguments) -> Result<i32, String> {
    let lab = Lab {
        command: arguments.command.join(" "),
        files: arguments.files.clone(),
        timeout: Duration::from_secs(arguments.timeout),
        memory_mib: arguments.memory,
        virtual_time: arguments.virtual_time,
        shadow_paging: arguments.shadow_paging,
        progress: !arguments.quiet,
    };
    let output = lab
        .run_with(|port, bytes| {
            // Whoever closed our output still gets the status.
            let _ = match port {
                Port::Console => Ok(()),
                Port::Stdout => io::stdout().write_all(bytes).and_then(|()| io::stdout().flush()),
                Port::Stderr => io::stderr().write_all(bytes),
            };
        })
        .map_err(|failure| failure.to_string())?;
    if let Some(directory) = &arguments.out {
        let failed = |e| format!("lab: --out {}: {e}", directory.display());
        fs::create_dir_all(directory).map_err(failed)?;
        for (name, bytes) in &output.files {
            fs::write(directory.join(name), bytes).map_err(failed)?;
        }
    }
    if lab.progress {
        eprintln!(
            "lab: status {}; booted in {:.1} s, ran for {:.1} s",
            output.status,
            output.boot.as_secs_f64(),
            output.elapsed.as_secs_f64()
        );
    }
    Ok(output.status)
}
