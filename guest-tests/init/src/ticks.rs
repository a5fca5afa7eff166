//! The timer interrupt of a kernel that has no local APIC timer: how often it
//! comes, by the clocks that do not depend on it.

use crate::report::Result as Report;
use crate::{jobs, marks, system, tsc};

const CLOCK_EVENT: &str = "/sys/devices/system/clockevents/clockevent0/current_device";

/// `ticks:SECONDS`: counts interrupts on IRQ 0 while asleep for so long, between
/// the marks 0 and 1.
///
/// # Errors
/// There is no IRQ 0 or no clockevent.
pub fn run(arguments: &[String]) -> Result<(), String> {
    let seconds = jobs::number(arguments, 0, 10)?;
    let tsc_hz = tsc::measure_hz();
    let (ticks_before, tsc_before) = (irq0_count()?, tsc::ordered());
    marks::mark(0);
    std::thread::sleep(std::time::Duration::from_secs(seconds));
    marks::mark(1);
    let (ticks_after, tsc_after) = (irq0_count()?, tsc::ordered());
    let elapsed_s = tsc_after.wrapping_sub(tsc_before) as f64 / tsc_hz;
    let ticks = ticks_after - ticks_before;
    Report::of("ticks")
        .text("clock_event", &system::read(CLOCK_EVENT)?)
        .count("ticks", ticks)
        .real("elapsed_s", elapsed_s)
        .real("ticks_per_s", ticks as f64 / elapsed_s)
        .print();
    Ok(())
}

/// Interrupts on IRQ 0 so far, on all CPUs.
fn irq0_count() -> Result<u64, String> {
    let table = system::read("/proc/interrupts")?;
    let counts = table.lines().find_map(|line| line.trim_start().strip_prefix("0:"));
    let counts = counts.ok_or("/proc/interrupts has no IRQ 0")?;
    Ok(counts.split_whitespace().map_while(|word| word.parse::<u64>().ok()).sum())
}
