//! Writes the manual page and the shell completions of `vmm` into a directory:
//! `cargo run -p vmm --example manual -- DIRECTORY`.

use clap::CommandFactory;
use clap_complete::Shell;
use std::fs::File;
use std::io;
use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let Some(directory) = std::env::args_os().nth(1) else {
        eprintln!("manual: name the directory to write to");
        return ExitCode::FAILURE;
    };
    let directory = Path::new(&directory);
    match write(directory) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("manual: {}: {e}", directory.display());
            ExitCode::FAILURE
        }
    }
}

fn write(directory: &Path) -> io::Result<()> {
    std::fs::create_dir_all(directory)?;
    // The page has room for what the screen of --help leaves out.
    let command = vmm::cli::Cli::command().mut_args(|arg| arg.hide_possible_values(false));
    clap_mangen::Man::new(command).render(&mut File::create(directory.join("vmm.1"))?)?;
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        clap_complete::generate_to(shell, &mut vmm::cli::Cli::command(), "vmm", directory)?;
    }
    Ok(())
}
