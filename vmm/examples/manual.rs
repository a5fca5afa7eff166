//! Writes the manual page and the shell completions of `vmm` into a directory:
//! `cargo run -p vmm --example manual -- DIRECTORY`.

use clap::CommandFactory;
use clap_complete::Shell;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Write as _};
use std::path::Path;
use std::process::ExitCode;
use vmm::ending::Ending;

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
    let mut page = File::create(directory.join("vmm.1"))?;
    clap_mangen::Man::new(command).render(&mut page)?;
    page.write_all(exit_status().as_bytes())?;
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        clap_complete::generate_to(shell, &mut vmm::cli::Cli::command(), "vmm", directory)?;
    }
    Ok(())
}

/// The section that clap knows nothing of, in man(7)'s language.
fn exit_status() -> String {
    let mut section = ".SH EXIT STATUS\n".to_owned();
    for (ending, what) in [
        (Ending::PowerOff, ", or a person quit"),
        (Ending::AcpiReset, ""),
        (Ending::TripleFault, ""),
        (Ending::GuestPanic, ""),
        (Ending::Refused("a wrong argument, an unusable file or host".into()), ""),
        (Ending::Timeout, ""),
        (Ending::KvmInternalError("RIP and instruction bytes are told".into()), ""),
        (Ending::VmmFailure("a defect of this program".into()), ""),
        (Ending::I8042Reset, ""),
    ] {
        // A String takes everything.
        let _ = writeln!(section, ".TP\n{}\n{ending}{what}", ending.code());
    }
    section + ".TP\n128+n\nsignal n\n"
}
