//! What the command line asks for: jobs separated by `,`, a job's words by `:`.
//! A backslash takes the next character as it is; a value that contains spaces
//! is quoted as the kernel requires: `run="exec:/bin/sh:-c:ls /"`.

use crate::{
    clock_cost, clocksource, contend, dmesg, kvm_probe, lab, memory, power, report, run,
    sleep_test, ticks,
};

/// One job: its name and its arguments, in order.
pub type Job = Vec<String>;

/// The value of `run=` on the kernel command line.
pub fn from_cmdline(cmdline: &str) -> Option<String> {
    // The kernel splits at spaces outside double quotes, and so must we.
    let mut quoted = false;
    cmdline
        .trim_end()
        .split(|c: char| {
            quoted ^= c == '"';
            c == ' ' && !quoted
        })
        .find_map(|word| word.trim_start_matches('"').strip_prefix("run="))
        .map(|value| value.replace('"', ""))
}

/// Splits a list of jobs into words.
pub fn parse(list: &str) -> Vec<Job> {
    let mut jobs = vec![vec![String::new()]];
    let mut characters = list.chars();
    while let Some(c) = characters.next() {
        match c {
            ',' => jobs.push(vec![String::new()]),
            ':' => jobs.last_mut().into_iter().for_each(|job| job.push(String::new())),
            _ => {
                let c = if c == '\\' { characters.next().unwrap_or(c) } else { c };
                jobs.last_mut().and_then(|job| job.last_mut()).into_iter().for_each(|w| w.push(c));
            }
        }
    }
    jobs.retain(|job| !job[0].is_empty());
    jobs
}

/// Runs one job; a failure has been reported when this returns.
///
/// # Errors
/// What failed, in words.
pub fn run(job: &Job) -> Result<(), String> {
    let (name, arguments) = (job[0].as_str(), &job[1..]);
    let outcome = match name {
        "clock-cost" => clock_cost::run(arguments),
        "clocksource" => clocksource::run(arguments),
        "contend" => contend::run(arguments),
        "dmesg" => dmesg::run(arguments),
        "memory" => memory::run(arguments),
        "sleep-test" => sleep_test::run(arguments),
        "ticks" => ticks::run(arguments),
        "exec" => run::program(arguments),
        "sh" => run::shell(),
        "idle" => power::idle(arguments),
        "hang" => power::hang(),
        "crash" => power::crash(),
        "reboot" => power::reboot(),
        "poweroff" => power::off(),
        "kvm-probe" => kvm_probe::run(),
        "lab" => lab::run(),
        _ => Err("no such job".into()),
    };
    outcome.inspect_err(|failure| report::error(name, failure))
}

/// The argument at `index` as a number, or `default` where it is absent.
///
/// # Errors
/// The argument that is not a number.
pub fn number(arguments: &[String], index: usize, default: u64) -> Result<u64, String> {
    arguments.get(index).map_or(Ok(default), |word| {
        word.parse().map_err(|_| format!("argument {word:?} is not a number"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_and_words_are_split_and_escapes_kept() {
        assert_eq!(
            parse(r"sleep-test:1000:1,,exec:/bin/cyclictest:-a0\,1,poweroff"),
            [
                vec!["sleep-test", "1000", "1"],
                vec!["exec", "/bin/cyclictest", "-a0,1"],
                vec!["poweroff"]
            ]
        );
    }

    #[test]
    fn the_run_word_is_found_between_others_and_in_either_quoting() {
        assert_eq!(from_cmdline("quiet run=dmesg,poweroff panic=-1\n").unwrap(), "dmesg,poweroff");
        assert_eq!(from_cmdline("a=\"run=no x\" run=\"exec:/a b\" c\n").unwrap(), "exec:/a b");
        assert_eq!(from_cmdline("\"run=exec:/a b\" c\n").unwrap(), "exec:/a b");
        assert_eq!(from_cmdline("prerun=1 quiet\n"), None);
    }
}
