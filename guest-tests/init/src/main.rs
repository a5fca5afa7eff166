//! The /init of Linux guests, and of the lab: one static program that runs the
//! jobs named on the kernel command line (`run=clock-cost,dmesg,poweroff`) and
//! prints one `@result {json}` line for each finding.
//!
//! Started as any other process it runs the jobs given as arguments instead:
//! `init kvm-probe`.

mod clock_cost;
mod clocksource;
mod contend;
mod dmesg;
mod jobs;
mod kvm_probe;
mod lab;
mod marks;
mod memory;
mod power;
mod report;
mod run;
mod sleep_test;
mod system;
mod ticks;
mod tsc;

use std::process::ExitCode;

fn main() -> ExitCode {
    if std::process::id() == 1 {
        boot();
    }
    let words: Vec<String> = std::env::args().skip(1).collect();
    let jobs = jobs::parse(&words.join(","));
    if jobs.is_empty() {
        eprintln!("init: name the jobs to run, for example: init clocksource clock-cost");
        return ExitCode::FAILURE;
    }
    let failures = jobs.iter().filter(|job| jobs::run(job).is_err()).count();
    if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Process 1: sets the machine up, runs the jobs and turns the machine off.
fn boot() -> ! {
    marks::mark(marks::INIT);
    for failure in system::mount_all() {
        report::error("init", &failure);
    }
    let cmdline = std::fs::read_to_string("/proc/cmdline").unwrap_or_default();
    system::quieten_console(&cmdline);
    std::panic::set_hook(Box::new(|info| report::error("init", &info.to_string())));

    let jobs = match jobs::from_cmdline(&cmdline) {
        Some(list) => jobs::parse(&list),
        None => jobs::parse("clocksource,sh"),
    };
    for job in &jobs {
        // The failure is already a result line; the jobs after it still count.
        let _ = jobs::run(job);
    }
    power::off()
}
