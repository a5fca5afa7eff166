//! The kernel's log, and the lines in it that a VMM must not cause.

use crate::report::Result as Report;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;

/// What a stock kernel says when the machine under it is wrong.
const DEFECTS: &[&str] = &[
    "unchecked MSR access",
    "[Firmware Bug]",
    "[Firmware Warn]",
    "MP-BIOS bug",
    "spurious",
    "APIC ID mismatch",
    "Marking TSC unstable",
    "Marking clocksource",
    "clocksource: timekeeping watchdog",
    "TSC warp",
    "soft lockup",
    "hard LOCKUP",
    "self-detected stall",
    "detected stalls",
    "nobody cared",
    "WARNING: CPU",
    "BUG:",
    "Oops",
    "Call Trace",
    "ACPI Error",
    "ACPI BIOS Error",
    "Unable to calibrate",
    "not responding",
    "unexpected IRQ",
];

/// What it says on Hyper-V by design: there the reference page is the clock.
const EXPECTED: &str = "Marking TSC unstable due to running on Hyper-V";

/// One record of the kernel's log.
pub struct Record {
    /// µs since boot.
    pub at_us: u64,
    /// The message.
    pub text: String,
}

/// Reads the log up to now.
///
/// # Errors
/// /dev/kmsg cannot be opened.
pub fn records() -> Result<Vec<Record>, String> {
    let mut log = File::options()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open("/dev/kmsg")
        .map_err(|e| format!("open /dev/kmsg: {e}"))?;
    let mut records = Vec::new();
    // One read is one record; EPIPE means that older ones were overwritten.
    let mut buffer = [0; 8192];
    loop {
        match log.read(&mut buffer) {
            Ok(0) => break,
            Ok(length) => records.extend(parse(&String::from_utf8_lossy(&buffer[..length]))),
            Err(e) if e.raw_os_error() == Some(libc::EPIPE) => {}
            Err(_) => break,
        }
    }
    Ok(records)
}

/// A record is `priority,sequence,µs,flags;text` (Documentation/ABI/testing/dev-kmsg).
fn parse(record: &str) -> Option<Record> {
    let (head, text) = record.split_once(';')?;
    let at_us = head.split(',').nth(2)?.parse().ok()?;
    Some(Record { at_us, text: text.lines().next().unwrap_or_default().to_owned() })
}

/// `dmesg`: prints the lines that name a defect. `dmesg:full` prints every line,
/// `dmesg:match:WORD…` those that contain one of the words.
///
/// # Errors
/// The log cannot be read; unknown arguments.
pub fn run(arguments: &[String]) -> Result<(), String> {
    let records = records()?;
    match arguments.first().map(String::as_str) {
        None => {
            let mut defects = 0;
            for record in records.iter().filter(|record| !record.text.contains(EXPECTED)) {
                if let Some(defect) = DEFECTS.iter().find(|d| record.text.contains(**d)) {
                    defects += 1;
                    line(record).text("defect", defect).print();
                }
            }
            Report::of("dmesg")
                .count("lines", records.len() as u64)
                .count("defects", defects)
                .print();
        }
        Some("full") => records.iter().for_each(|record| line(record).print()),
        Some("match") => records
            .iter()
            .filter(|record| arguments[1..].iter().any(|word| record.text.contains(word)))
            .for_each(|record| line(record).print()),
        Some(other) => return Err(format!("unknown argument {other:?}: use full or match:WORD")),
    }
    Ok(())
}

fn line(record: &Record) -> Report {
    Report::of("dmesg").count("at_us", record.at_us).text("text", &record.text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_has_its_time_and_its_first_line() {
        let record = parse("6,339,5140900,-;NET: Registered; 10\n SUBSYSTEM=x\n").unwrap();
        assert_eq!((record.at_us, record.text.as_str()), (5_140_900, "NET: Registered; 10"));
        assert!(parse("nonsense").is_none());
    }
}
