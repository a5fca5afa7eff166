//! Writes to the console without a pause until a byte comes in, and tells by the page and by the
//! TSC how long that took and how long the longest write did: a vCPU that its console held up
//! would have written less, or waited once for long. It says `ready` first and reads its input
//! every 256 bytes.
#![no_std]
#![no_main]

use guests::args::Args;
use guests::clocks::{self, PAGE};
use guests::console::{self, ResultLine};
use guests::cpu::Cpu;
use guests::guest_main;

guest_main!(main);

const LINE: u64 = 64;
const LINES_PER_LOOK: u64 = 4;

fn main(_args: &Args, _cpu: &'static Cpu) {
    if PAGE.enable().is_none() {
        panic!("console-flood needs --hv-tsc-page");
    }
    let now = || PAGE.read().or_else(clocks::msr).unwrap_or(0);
    ResultLine::new("console-flood").text("state", "ready").end();
    let (start, start_tsc) = (now(), clocks::tsc());
    let (mut lines, mut last, mut longest, mut backward) = (0_u64, start, 0_u64, 0_u64);
    while lines % LINES_PER_LOOK != 0 || !console::has_input() {
        for column in 1..=LINE {
            console::send(if column == LINE { b'\n' } else { b'.' });
            let time = now();
            backward += u64::from(time < last);
            longest = longest.max(time.saturating_sub(last));
            last = time;
        }
        lines += 1;
    }
    let (end, end_tsc) = (now(), clocks::tsc());
    ResultLine::new("console-flood")
        .number("bytes", lines * LINE)
        .number("elapsed_100ns", end - start)
        .number("elapsed_cycles", end_tsc - start_tsc)
        .number("tsc_hz", clocks::tsc_hz().unwrap_or(0))
        .number("longest_100ns", longest)
        .number("backward", backward)
        .end();
}
