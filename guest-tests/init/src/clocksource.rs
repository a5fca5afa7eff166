//! Which clocks the kernel has and uses; and switching between them.

use crate::report::Result as Report;
use crate::system;
use std::fs;

const SYSFS: &str = "/sys/devices/system/clocksource/clocksource0";

/// The clocksource in use.
///
/// # Errors
/// sysfs cannot be read.
pub fn current() -> Result<String, String> {
    system::read(&format!("{SYSFS}/current_clocksource"))
}

/// Every clocksource that the kernel offers, best first.
///
/// # Errors
/// sysfs cannot be read.
pub fn available() -> Result<Vec<String>, String> {
    let list = system::read(&format!("{SYSFS}/available_clocksource"))?;
    Ok(list.split_whitespace().map(str::to_owned).collect())
}

/// Switches to a clocksource and proves it by reading its name back.
///
/// # Errors
/// The kernel refused, or uses another one all the same.
pub fn switch(name: &str) -> Result<(), String> {
    let path = format!("{SYSFS}/current_clocksource");
    fs::write(&path, name).map_err(|e| format!("write {name} to {path}: {e}"))?;
    let now = current()?;
    if now == name { Ok(()) } else { Err(format!("asked for clocksource {name}, got {now}")) }
}

/// The clock event device of every CPU, in CPU order, as /proc/timer_list has them.
fn clockevents() -> Result<Vec<String>, String> {
    Ok(per_cpu_devices(&system::read("/proc/timer_list")?))
}

fn per_cpu_devices(timer_list: &str) -> Vec<String> {
    let mut lines = timer_list.lines();
    let mut devices = Vec::new();
    while let Some(line) = lines.next() {
        if line.starts_with("Per CPU device:")
            && let Some(device) = lines.next().and_then(|l| l.strip_prefix("Clock Event Device: "))
        {
            devices.push(device.trim().to_owned());
        }
    }
    devices
}

/// `clocksource[:interrupts]`: prints the clocks in use; on request every
/// interrupt that has fired.
///
/// # Errors
/// sysfs or procfs cannot be read.
pub fn run(arguments: &[String]) -> Result<(), String> {
    Report::of("clocksource")
        .text("current", &current()?)
        .texts("available", &available()?)
        .count("cpus", system::cpus().len() as u64)
        .texts("clockevents", &clockevents()?)
        .print();
    match arguments.first().map(String::as_str) {
        None => Ok(()),
        Some("interrupts") => interrupts(),
        Some(other) => Err(format!("unknown argument {other:?}: use interrupts")),
    }
}

fn interrupts() -> Result<(), String> {
    for (irq, counts, name) in fired(&system::read("/proc/interrupts")?) {
        Report::of("interrupts")
            .text("irq", &irq)
            .counts("counts", &counts)
            .text("name", &name)
            .print();
    }
    Ok(())
}

fn fired(table: &str) -> Vec<(String, Vec<u64>, String)> {
    table
        .lines()
        .filter_map(|line| {
            let (irq, rest) = line.split_once(':')?;
            let words: Vec<&str> = rest.split_whitespace().collect();
            let counts: Vec<u64> = words.iter().map_while(|word| word.parse().ok()).collect();
            let name = words[counts.len()..].join(" ");
            counts.iter().any(|&n| n > 0).then(|| (irq.trim().to_owned(), counts, name))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clock_event_devices_are_found_per_cpu_and_not_the_broadcast_one() {
        let list = "Tick Device: mode:     1\nBroadcast device\nClock Event Device: hpet\n max\n\
                    Tick Device: mode:     1\nPer CPU device: 0\nClock Event Device: lapic-deadline\n\
                    Tick Device: mode:     1\nPer CPU device: 1\nClock Event Device: Hyper-V clockevent\n";
        assert_eq!(per_cpu_devices(list), ["lapic-deadline", "Hyper-V clockevent"]);
    }

    #[test]
    fn only_interrupts_that_fired_are_listed() {
        let table = "           CPU0       CPU1\n  0:   5   0  IO-APIC   2-edge  timer\n\
                     LOC:  10  20   Local timer interrupts\nHVS:   0   0   stimer\nERR:   0\n";
        assert_eq!(
            fired(table),
            [
                ("0".into(), vec![5, 0], "IO-APIC 2-edge timer".into()),
                ("LOC".into(), vec![10, 20], "Local timer interrupts".into())
            ]
        );
    }
}
