//! The monitor: the commands of [`crate::control`], typed and shown as words.

use crate::control::{Command, Control};
use serde_json::Value;
use std::fmt::Write;

/// What follows from a command.
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    /// Show this and wait for the next command.
    Say(String),
    /// The monitor is done.
    Close,
}

const HELP: &str = "\
status      whether the guest runs, and its time
stats       exits so far, by reason
pause       stop all vCPUs, and reference time
resume      let them go on
nmi CPU     send an NMI to this vCPU
quit        end the machine (as Ctrl-A x)
close       close the monitor (as Ctrl-A c)
";

/// Acts on a machine.
pub struct Monitor {
    control: Control,
}

impl Monitor {
    /// Acts through `control`.
    pub fn new(control: Control) -> Self {
        Self { control }
    }

    /// Ends the machine.
    pub fn quit(&self) {
        // Quitting has no way to fail.
        let _ = self.control.execute(Command::Quit {});
    }

    /// Runs one command line.
    pub fn execute(&self, line: &str) -> Next {
        let words: Vec<&str> = line.split_whitespace().collect();
        Next::Say(match words[..] {
            [] => String::new(),
            ["help" | "h" | "?"] => HELP.into(),
            ["status"] => self.tell(Command::Status {}),
            ["stats"] => self.tell(Command::Stats {}),
            ["pause"] => self.tell(Command::Pause {}),
            ["resume"] => self.tell(Command::Resume {}),
            ["nmi", cpu] => match cpu.parse() {
                Ok(cpu) => self.tell(Command::Nmi { cpu }),
                Err(_) => format!("nmi {cpu}: give the number of a vCPU"),
            },
            ["close" | "exit"] => return Next::Close,
            ["quit"] => {
                self.quit();
                return Next::Close;
            }
            _ => format!("{}: no such command; help lists them", line.trim()),
        })
    }

    fn tell(&self, command: Command) -> String {
        match self.control.execute(command) {
            Ok(answer) => in_words(&answer),
            Err(line) => line,
        }
    }
}

/// One line for each number or word; of exits, how many for each reason.
fn in_words(answer: &Value) -> String {
    let mut text = String::new();
    let rows = answer["reasons"].as_object().or(answer.as_object());
    for (name, value) in rows.into_iter().flatten() {
        let value = value.get("count").unwrap_or(value);
        let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        // A String takes everything.
        let _ = writeln!(text, "{name:<16} {value}");
    }
    text
}
