//! Periodic HPET timers, all as messages to this vCPU, for a time: how many interrupts come, how
//! many at most in a short window, and whether anything else still runs.
//!
//! Words: `timers` (1), `period` (100 000 counts), `first` (a period: counts until the first match,
//! 0 for a comparator that is already passed), `interrupts=0|1` (1), `then=measure|halt` (measure;
//! `halt` sleeps for good), `ms` (1000), `window_us` (10 000), `apic`.
#![no_std]
#![no_main]

use core::sync::atomic::{AtomicU64, Ordering};

use guests::args::Args;
use guests::clocks::{self, Hpet};
use guests::console::ResultLine;
use guests::cpu::Cpu;
use guests::entry::TIMER_VECTOR;
use guests::{guest_main, ring0, smp};

guest_main!(main);

const GUEST: &str = "hpet-ticks";

const CONFIG: usize = 0x010;
const COUNTER: usize = 0x0F0;
const ENABLE: u64 = 1;
const INTERRUPT: u64 = 1 << 2;
/// Periodic, VAL_SET, message.
const PERIODIC_MESSAGE: u64 = 1 << 3 | 1 << 6 | 1 << 14;

fn main(args: &Args, cpu: &'static Cpu) {
    let Some(hpet) = Hpet::find() else {
        panic!("no HPET");
    };
    let Some(tsc_hz) = clocks::tsc_hz() else {
        panic!("no clock tells the TSC's frequency");
    };
    smp::start(args, cpu, |_| {});
    let timers = args.number("timers", 1) as usize;
    let period = args.number("period", 100_000);
    let first = args.number("first", period);
    let duration = tsc_hz / 1000 * args.number("ms", 1000);
    let window = tsc_hz / 1_000_000 * args.number("window_us", 10_000);

    hpet.write(CONFIG, 0);
    hpet.write(COUNTER, 0);
    let interrupt = if args.number("interrupts", 1) != 0 { INTERRUPT } else { 0 };
    let address = 0xFEE0_0000 | u64::from(cpu.apic_id.load(Ordering::Relaxed)) << 12;
    for timer in 0..timers {
        let base = 0x100 + 0x20 * timer;
        hpet.write(base + 0x10, address << 32 | u64::from(TIMER_VECTOR));
        hpet.write(base, PERIODIC_MESSAGE | interrupt);
        hpet.write(base + 8, first);
        hpet.write(base + 8, period);
    }
    ring0::enable_interrupts();
    let start = clocks::tsc();
    hpet.write(CONFIG, ENABLE);

    let count = || cpu.irq_count.load(Ordering::Acquire);
    // Whoever waits for this line finds the timers at work, if they work at all.
    while count() == 0 && clocks::tsc().wrapping_sub(start) < tsc_hz / 10 {
        core::hint::spin_loop();
    }
    ResultLine::new(GUEST).number("armed", timers).end();
    if args.text("then") == Some("halt") {
        ring0::wait_irq(&AtomicU64::new(0), 0);
    }
    let (mut window_start, mut window_count, mut most) = (start, count(), 0);
    let mut rounds = 0_u64;
    let elapsed = loop {
        rounds += 1;
        let now = clocks::tsc();
        if now.wrapping_sub(window_start) >= window {
            most = most.max(count() - window_count);
            (window_start, window_count) = (now, count());
        }
        let elapsed = now.wrapping_sub(start);
        if elapsed >= duration {
            break elapsed;
        }
    };
    hpet.write(CONFIG, 0);
    let counts = hpet.read(COUNTER);
    ResultLine::new(GUEST)
        .number("timers", timers)
        .number("period", period)
        .number("interrupts", count())
        .number("counts", counts)
        .number("most_in_window", most)
        .number("elapsed_ms", elapsed / (tsc_hz / 1000))
        .number("rounds", rounds)
        .end();
}
