//! Writes IA32_TSC and IA32_TSC_ADJUST, and asks whether the page and the MSR still are one clock.
//!
//! Words: `delta` (10 000 000 000 cycles), `pairs` (200) of page ≤ MSR ≤ page after each write.
#![no_std]
#![no_main]

use guests::args::Args;
use guests::clocks::{self, PAGE};
use guests::console::ResultLine;
use guests::cpu::Cpu;
use guests::order::PageAndMsr;
use guests::{guest_main, ring0};

guest_main!(main);

const GUEST: &str = "tsc-write";
const IA32_TSC: u32 = 0x10;
const IA32_TSC_ADJUST: u32 = 0x3B;

fn main(args: &Args, _cpu: &'static Cpu) {
    let delta = args.number("delta", 10_000_000_000);
    let pairs = args.number("pairs", 200);
    if PAGE.enable().is_none() {
        ResultLine::new(GUEST).text("skipped", "no reference TSC page").end();
        return;
    }
    PageAndMsr::check(pairs).report(GUEST, "untouched");
    type Write = fn(u64) -> Option<()>;
    let writes: [(&str, Write); 4] = [
        ("tsc+", |delta| ring0::wrmsr(IA32_TSC, clocks::tsc().wrapping_add(delta))),
        ("tsc-", |delta| ring0::wrmsr(IA32_TSC, clocks::tsc().wrapping_sub(delta))),
        ("adjust+", |delta| adjust(|old| old.wrapping_add(delta))),
        ("adjust-", |delta| adjust(|old| old.wrapping_sub(delta))),
    ];
    for (name, write) in writes {
        let (tsc, before) = (clocks::tsc(), clocks::msr().unwrap_or(0));
        let faulted = write(delta).is_none();
        let page = PAGE.read();
        let (tsc_after, after) = (clocks::tsc(), clocks::msr().unwrap_or(0));
        ResultLine::new(GUEST)
            .text("write", name)
            .number("faulted", faulted)
            .number("tsc_step", tsc_after.wrapping_sub(tsc) as i64)
            .number("msr_step_100ns", after.wrapping_sub(before) as i64)
            .number("page_step_100ns", page.unwrap_or(after).wrapping_sub(before) as i64)
            .number("page_valid", page.is_some())
            .end();
        PageAndMsr::check(pairs).report(GUEST, name);
    }
}

fn adjust(change: impl Fn(u64) -> u64) -> Option<()> {
    ring0::wrmsr(IA32_TSC_ADJUST, change(ring0::rdmsr(IA32_TSC_ADJUST)?))
}
