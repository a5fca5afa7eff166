//! The monitor at the terminal: words in, [`Control`]'s commands out, and their
//! answers as lines.

use crate::control::{Command, Control};
use serde_json::Value;
use std::fmt::Write;

/// What follows from a line.
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    /// Show this and wait for the next line.
    Say(String),
    /// The monitor is done.
    Close,
}

const HELP: &str = "\
status      whether the guest runs, and its time
stats       exits so far, by reason
pause       stop all vCPUs and reference time
resume      let both go on
nmi [N]     send an NMI to vCPU N (0)
slew PPB    change the rate of reference time
republish   publish the TSC page anew
quit        end the machine (as Ctrl-A x)
close       close the monitor (as Ctrl-A c)
";

/// What a line asks for.
#[derive(Debug, PartialEq, Eq)]
enum Request {
    Nothing,
    Help,
    Close,
    Command(Command),
}

fn parse(line: &str) -> Result<Request, String> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let number = |what: &str, word: &str| format!("{what}: {word} is not a number that it takes");
    Ok(match words[..] {
        [] => Request::Nothing,
        ["help" | "h" | "?"] => Request::Help,
        ["close" | "exit"] => Request::Close,
        ["status"] => Request::Command(Command::Status {}),
        ["stats"] => Request::Command(Command::Stats {}),
        ["pause"] => Request::Command(Command::Pause {}),
        ["resume" | "cont"] => Request::Command(Command::Resume {}),
        ["republish"] => Request::Command(Command::Republish {}),
        ["quit"] => Request::Command(Command::Quit {}),
        ["nmi"] => Request::Command(Command::Nmi { cpu: 0 }),
        ["nmi", cpu] => {
            let cpu = cpu.parse().map_err(|_| number("nmi", cpu))?;
            Request::Command(Command::Nmi { cpu })
        }
        ["slew", ppb] => {
            let ppb = ppb.parse().map_err(|_| number("slew", ppb))?;
            Request::Command(Command::Slew { ppb })
        }
        [word, ..] => return Err(format!("{word}: no such command; help lists them")),
    })
}

/// Acts on a machine.
pub struct Monitor {
    control: Control,
}

impl Monitor {
    /// For this machine.
    pub fn new(control: Control) -> Self {
        Self { control }
    }

    /// Ends the machine.
    pub fn quit(&self) {
        // It has nothing to refuse.
        let _ = self.control.execute(Command::Quit {});
    }

    /// Runs one line.
    pub fn execute(&self, line: &str) -> Next {
        let command = match parse(line) {
            Ok(Request::Nothing) => return Next::Say(String::new()),
            Ok(Request::Help) => return Next::Say(HELP.into()),
            Ok(Request::Close) => return Next::Close,
            Ok(Request::Command(command)) => command,
            Err(wrong) => return Next::Say(wrong),
        };
        match self.control.execute(command) {
            Ok(_) if command == (Command::Quit {}) => Next::Close,
            Ok(answer) => Next::Say(lines(&answer)),
            Err(wrong) => Next::Say(wrong),
        }
    }
}

/// An answer for people. Exit statistics come as their counts by reason; the rest
/// is one `name value` a line.
fn lines(answer: &Value) -> String {
    let fields = answer.get("reasons").unwrap_or(answer).as_object();
    if fields.is_none_or(|fields| fields.is_empty()) {
        return "done".into();
    }
    let mut text = String::new();
    for (name, value) in fields.into_iter().flatten() {
        let value = value.get("count").unwrap_or(value);
        let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        // A String takes everything.
        let _ = writeln!(text, "{name:<16} {value}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn words_become_commands() {
        assert_eq!(parse(" nmi  3 "), Ok(Request::Command(Command::Nmi { cpu: 3 })));
        assert_eq!(parse("slew -50"), Ok(Request::Command(Command::Slew { ppb: -50 })));
        assert_eq!(parse(""), Ok(Request::Nothing));
        for wrong in ["nmi x", "nmi -1", "slew", "pause now", "explode"] {
            let line = parse(wrong).unwrap_err();
            assert!(!line.contains('\n'), "{line}");
        }
    }

    #[test]
    fn answers_are_lines() {
        assert_eq!(lines(&json!({})), "done");
        assert_eq!(lines(&json!({"state": "paused"})), "state            paused\n");
        let stats = json!({"reasons": {"halt": {"count": 3, "total_ns": 9}}, "msrs": []});
        assert_eq!(lines(&stats), "halt             3\n");
    }
}
