//! The HPET against the IA-PC HPET specification 1.0a, through its registers.
//!
//! Prints one line per register at reset and one per check. Lines hold nothing that depends on
//! time, so two implementations of the registers can be compared line by line.
//!
//! Words: `interrupts=0|1` (1: also fire timers through the I/O APIC and as messages),
//! `resolution_ns` (10: how coarse the counter may be), `cpus`, `apic`.
#![no_std]
#![no_main]

use core::fmt;
use core::sync::atomic::Ordering;

use guests::args::Args;
use guests::clocks::{self, Hpet};
use guests::console::ResultLine;
use guests::cpu::Cpu;
use guests::entry::TIMER_VECTOR;
use guests::{guest_main, ioapic, ring0, smp};

guest_main!(main);

const GUEST: &str = "hpet-conformance";

const CAPABILITIES: usize = 0x000;
const CONFIG: usize = 0x010;
const STATUS: usize = 0x020;
const COUNTER: usize = 0x0F0;

const ENABLE: u64 = 1;
const LEGACY: u64 = 2;

const LEVEL: u64 = 1 << 1;
const INTERRUPT: u64 = 1 << 2;
const PERIODIC: u64 = 1 << 3;
const CAN_PERIODIC: u64 = 1 << 4;
const CAN_64_BITS: u64 = 1 << 5;
const SET_VALUE: u64 = 1 << 6;
const MODE_32: u64 = 1 << 8;
const ROUTE: u64 = 0x1F << 9;
const MESSAGE: u64 = 1 << 14;
const CAN_MESSAGE: u64 = 1 << 15;

/// Counts in a millisecond, at the 10 ns that every HPET here has.
const MS: u64 = 100_000;

fn config_of(timer: usize) -> usize {
    0x100 + 0x20 * timer
}

fn comparator_of(timer: usize) -> usize {
    0x108 + 0x20 * timer
}

fn message_of(timer: usize) -> usize {
    0x110 + 0x20 * timer
}

/// The device and the tally.
struct Test {
    hpet: Hpet,
    resolution_counts: u64,
    checks: u32,
    failed: u32,
}

fn main(args: &Args, cpu: &'static Cpu) {
    let Some(hpet) = Hpet::find() else {
        panic!("no HPET");
    };
    smp::start(args, cpu, |_| {});
    let resolution_counts =
        (args.number("resolution_ns", 10) * 1_000_000).div_ceil(hpet.period_fs()).max(1);
    let mut test = Test { hpet, resolution_counts, checks: 0, failed: 0 };
    let timers = test.registers();
    test.counter();
    for timer in 0..timers {
        test.timer_config(timer);
        test.one_shot(timer);
        test.periodic(timer);
        test.status(timer);
    }
    if args.number("interrupts", 1) != 0 {
        ring0::enable_interrupts();
        for timer in 0..timers {
            test.pin(timer, cpu);
            test.message(timer, cpu);
        }
        test.legacy(cpu);
    }
    test.hpet.write(CONFIG, ENABLE);
    ResultLine::new(GUEST)
        .number("timers", timers)
        .number("checks", test.checks)
        .number("failed", test.failed)
        .end();
}

impl Test {
    fn check(&mut self, name: impl fmt::Display, pass: bool) {
        self.checks += 1;
        self.failed += u32::from(!pass);
        ResultLine::new(GUEST).text("check", name).number("pass", pass).end();
    }

    fn value(&self, name: impl fmt::Display, value: u64) {
        ResultLine::new(GUEST)
            .text("register", name)
            .text("value", format_args!("{value:#018x}"))
            .end();
    }

    /// 2.3.4 to 2.3.6, and what a timer's registers are at first. Returns the number of timers.
    fn registers(&mut self) -> usize {
        let hpet = self.hpet;
        let capabilities = hpet.read(CAPABILITIES);
        let timers = (capabilities >> 8 & 0x1F) as usize + 1;
        self.value("capabilities", capabilities);
        self.check("period-allowed", (1..=0x05F5_E100).contains(&(capabilities >> 32)));
        self.check("revision-not-0", capabilities & 0xFF != 0);
        self.check("three-timers-or-more", timers >= 3);
        let (low, high) = (hpet.read_half(CAPABILITIES), hpet.read_half(CAPABILITIES + 4));
        self.check("halves-make-the-whole", u64::from(high) << 32 | u64::from(low) == capabilities);
        hpet.write(CAPABILITIES, !capabilities);
        self.check("capabilities-read-only", hpet.read(CAPABILITIES) == capabilities);

        hpet.write(CONFIG, !0);
        let all_ones = hpet.read(CONFIG);
        hpet.write(CONFIG, 0);
        let legacy = if capabilities & 1 << 15 != 0 { LEGACY } else { 0 };
        self.check("config-reserved-bits-zero", all_ones == ENABLE | legacy);
        self.check("config-writable", hpet.read(CONFIG) == 0);
        for timer in 0..timers {
            self.value(format_args!("timer{timer}-config"), hpet.read(config_of(timer)));
        }
        self.check("behind-the-timers-zero", hpet.read(config_of(timers)) == 0);
        self.check("between-registers-zero", hpet.read(0x008) == 0 && hpet.read(0x018) == 0);
        timers
    }

    /// 2.3.7: halting, writing, starting.
    fn counter(&mut self) {
        let hpet = self.hpet;
        hpet.write(CONFIG, 0);
        let halted = hpet.read(COUNTER);
        self.pause();
        self.check("halted-stands", hpet.read(COUNTER) == halted);
        hpet.write(COUNTER, 0x0123_4567_89AB_CDEF);
        self.check("halted-written", hpet.read(COUNTER) == 0x0123_4567_89AB_CDEF);
        hpet.write_half(COUNTER, 0x1111_1111);
        self.check("halted-low-half", hpet.read(COUNTER) == 0x0123_4567_1111_1111);
        hpet.write_half(COUNTER + 4, 0x2222_2222);
        self.check("halted-high-half", hpet.read(COUNTER) == 0x2222_2222_1111_1111);
        hpet.write(COUNTER, 0xFFFF_FFF0);
        hpet.write(CONFIG, ENABLE);
        self.check("starts-where-written", hpet.read(COUNTER) >= 0xFFFF_FFF0);
        self.wait(0x10 + self.resolution_counts);
        self.check("carries-into-high-half", hpet.read(COUNTER) >= 1 << 32);
        let mut last = hpet.read(COUNTER);
        let mut backward = 0_u32;
        for _ in 0..1000 {
            let next = hpet.read(COUNTER);
            backward += u32::from(next < last);
            last = next;
        }
        self.check("never-backward", backward == 0);
        hpet.write(CONFIG, 0);
        hpet.write(COUNTER, !0 - 10);
        hpet.write(CONFIG, ENABLE);
        let (start, patience) = (clocks::tsc(), 5_000_000_000);
        while hpet.read(COUNTER) >= !0 - 10 && clocks::tsc().wrapping_sub(start) < patience {
            core::hint::spin_loop();
        }
        self.check("wraps-at-64-bits", hpet.read(COUNTER) < !0 - 10);
        self.stop();
    }

    /// 2.3.8: which bits can be written.
    fn timer_config(&mut self, timer: usize) {
        let hpet = self.hpet;
        let initial = hpet.read(config_of(timer));
        let mut writable = LEVEL | INTERRUPT;
        for (capability, bits) in
            [(CAN_PERIODIC, PERIODIC), (CAN_64_BITS, MODE_32), (CAN_MESSAGE, MESSAGE)]
        {
            if initial & capability != 0 {
                writable |= bits;
            }
        }
        hpet.write(config_of(timer), !INTERRUPT);
        let ones = hpet.read(config_of(timer));
        hpet.write(config_of(timer), 0);
        let zeros = hpet.read(config_of(timer));
        // VAL_SET may read as 1 until the comparator is written.
        let fixed = !(writable | ROUTE | SET_VALUE);
        self.check(
            format_args!("timer{timer}-writable-bits"),
            ones & writable == writable & !INTERRUPT && zeros & writable == 0,
        );
        self.check(
            format_args!("timer{timer}-fixed-bits"),
            ones & fixed == initial & fixed && zeros & fixed == initial & fixed,
        );
        let routes = initial >> 32;
        let accepted = (0..32_u64).filter(|pin| routes >> pin & 1 == 1).all(|pin| {
            hpet.write(config_of(timer), pin << 9);
            hpet.read(config_of(timer)) & ROUTE == pin << 9
        });
        self.check(format_args!("timer{timer}-routes"), routes != 0 && accepted);
        hpet.write(config_of(timer), 0);
    }

    /// 2.3.9.1: a one-shot comparator keeps what is written.
    fn one_shot(&mut self, timer: usize) {
        let hpet = self.hpet;
        let wide = hpet.read(config_of(timer)) & CAN_64_BITS != 0;
        hpet.write(comparator_of(timer), 0xAAAA_BBBB_CCCC_DDDD);
        let expected = if wide { 0xAAAA_BBBB_CCCC_DDDD } else { 0xCCCC_DDDD };
        self.check(
            format_args!("timer{timer}-comparator"),
            hpet.read(comparator_of(timer)) == expected,
        );
        hpet.write_half(comparator_of(timer), 0x1234_5678);
        hpet.write_half(comparator_of(timer) + 4, 0x0000_0009);
        let expected = if wide { 0x9_1234_5678 } else { 0x1234_5678 };
        self.check(
            format_args!("timer{timer}-comparator-halves"),
            hpet.read(comparator_of(timer)) == expected,
        );
        self.run_for(100);
        self.check(
            format_args!("timer{timer}-one-shot-stays"),
            hpet.read(comparator_of(timer)) == expected,
        );
    }

    /// 2.3.9.2.2: the comparator moves on by the period, with every way to write both.
    fn periodic(&mut self, timer: usize) {
        const FIRST: u64 = 1000;
        const PERIOD: u64 = 700;
        let hpet = self.hpet;
        if hpet.read(config_of(timer)) & CAN_PERIODIC == 0 {
            return;
        }
        let (config, comparator) = (config_of(timer), comparator_of(timer));
        type Write = fn(Hpet, usize, u64);
        let writes: [(&str, Write); 3] = [
            ("whole", |hpet, at, value| hpet.write(at, value)),
            ("low-high", |hpet, at, value| {
                hpet.write_half(at, value as u32);
                hpet.write_half(at + 4, (value >> 32) as u32);
            }),
            ("high-low", |hpet, at, value| {
                hpet.write_half(at + 4, (value >> 32) as u32);
                hpet.write_half(at, value as u32);
            }),
        ];
        for (name, write) in writes {
            self.stop();
            hpet.write(COUNTER, 0);
            hpet.write(config, PERIODIC | SET_VALUE);
            write(hpet, comparator, FIRST);
            write(hpet, comparator, PERIOD);
            self.check(
                format_args!("timer{timer}-periodic-{name}-first"),
                hpet.read(comparator) == FIRST,
            );
            self.check(
                format_args!("timer{timer}-periodic-{name}-clears-value-set"),
                hpet.read(config) & SET_VALUE == 0,
            );
            self.run_for(10 * FIRST);
            let (counter, next) = (hpet.read(COUNTER), hpet.read(comparator));
            self.check(
                format_args!("timer{timer}-periodic-{name}-moves"),
                next > counter
                    && next <= counter + PERIOD + self.resolution_counts
                    && (next - FIRST).is_multiple_of(PERIOD),
            );
        }
        self.stop();
        hpet.write(config, PERIODIC | MODE_32 | SET_VALUE);
        hpet.write(COUNTER, 0xFFFF_FF00);
        hpet.write(comparator, 0xFFFF_FFF0);
        hpet.write(comparator, 0x1000);
        self.run_for(0x800);
        let next = hpet.read(comparator);
        self.check(format_args!("timer{timer}-periodic-32-bit-wraps"), next <= 0xFFFF_FFFF);
        for period in [0, 1] {
            self.stop();
            hpet.write(COUNTER, 0);
            hpet.write(config, PERIODIC | SET_VALUE);
            hpet.write(comparator, 10);
            hpet.write(comparator, period);
            self.run_for(1000);
            self.check(format_args!("timer{timer}-period-{period}-survives"), true);
        }
        hpet.write(config, 0);
    }

    /// 2.3.6: level matches are held in the status register, edges are not.
    fn status(&mut self, timer: usize) {
        let hpet = self.hpet;
        let bit = 1 << timer;
        for (name, flags) in [("edge", 0), ("level", LEVEL)] {
            self.stop();
            hpet.write(STATUS, !0);
            hpet.write(COUNTER, 0);
            // Masked at the I/O APIC, where every pin is at first.
            hpet.write(config_of(timer), flags | self.first_route(timer) << 9);
            hpet.write(comparator_of(timer), 100);
            hpet.write(config_of(timer), flags | INTERRUPT | self.first_route(timer) << 9);
            self.run_for(1000);
            let set = hpet.read(STATUS) & bit != 0;
            self.check(format_args!("timer{timer}-status-{name}"), set == (flags == LEVEL));
            hpet.write(STATUS, 0);
            self.check(
                format_args!("timer{timer}-status-{name}-0-keeps"),
                (hpet.read(STATUS) & bit != 0) == set,
            );
            hpet.write(STATUS, bit);
            self.check(
                format_args!("timer{timer}-status-{name}-1-clears"),
                hpet.read(STATUS) & bit == 0,
            );
            hpet.write(config_of(timer), 0);
        }
    }

    /// One shot through the I/O APIC, then a period.
    fn pin(&mut self, timer: usize, cpu: &'static Cpu) {
        let pin = self.first_route(timer);
        ioapic::route(pin as u32, TIMER_VECTOR, cpu.apic_id.load(Ordering::Relaxed));
        self.fires(format_args!("timer{timer}-pin"), timer, pin << 9, 0, cpu);
        ioapic::mask(pin as u32);
    }

    /// 2.5.1: the same as messages to this vCPU's local APIC.
    fn message(&mut self, timer: usize, cpu: &'static Cpu) {
        if self.hpet.read(config_of(timer)) & CAN_MESSAGE == 0 {
            return;
        }
        let address = 0xFEE0_0000 | u64::from(cpu.apic_id.load(Ordering::Relaxed)) << 12;
        self.hpet.write(message_of(timer), address << 32 | u64::from(TIMER_VECTOR));
        self.check(
            format_args!("timer{timer}-message-register"),
            self.hpet.read(message_of(timer)) == address << 32 | u64::from(TIMER_VECTOR),
        );
        self.fires(format_args!("timer{timer}-message"), timer, MESSAGE, 0, cpu);
    }

    /// 2.3.5: under legacy replacement timers 0 and 1 are IRQ 0 (I/O APIC pin 2) and IRQ 8.
    fn legacy(&mut self, cpu: &'static Cpu) {
        if self.hpet.read(CAPABILITIES) & 1 << 15 == 0 {
            return;
        }
        for (timer, pin) in [(0, 2), (1, 8)] {
            ioapic::route(pin, TIMER_VECTOR, cpu.apic_id.load(Ordering::Relaxed));
            self.stop();
            self.hpet.write(CONFIG, LEGACY);
            self.fires(format_args!("timer{timer}-legacy"), timer, 0, LEGACY, cpu);
            ioapic::mask(pin);
        }
        self.stop();
    }

    fn fires(
        &mut self,
        name: impl fmt::Display,
        timer: usize,
        delivery: u64,
        general: u64,
        cpu: &'static Cpu,
    ) {
        let hpet = self.hpet;
        let count = || cpu.irq_count.load(Ordering::Acquire);

        self.arm(timer, delivery, MS);
        let before = count();
        self.run_under(general, 3 * MS);
        self.check(format_args!("{name}-masked-silent"), count() == before);

        self.arm(timer, delivery | INTERRUPT, MS);
        let before = count();
        self.run_until(general, || count() > before);
        self.check(format_args!("{name}-one-shot-once"), count() == before + 1);

        if hpet.read(config_of(timer)) & CAN_PERIODIC != 0 {
            self.stop();
            hpet.write(COUNTER, 0);
            hpet.write(config_of(timer), delivery | INTERRUPT | PERIODIC | SET_VALUE);
            hpet.write(comparator_of(timer), MS);
            hpet.write(comparator_of(timer), MS);
            let before = count();
            self.run_until(general, || count() >= before + 2);
            // A late timer thread merges matches; it never invents one.
            let fired = count() - before;
            let passed = hpet.read(COUNTER) / MS;
            self.check(format_args!("{name}-periodic-repeats"), fired >= 2);
            self.check(format_args!("{name}-periodic-not-more"), fired <= passed);
        }
        hpet.write(config_of(timer), 0);
    }

    fn arm(&self, timer: usize, config: u64, comparator: u64) {
        self.stop();
        self.hpet.write(COUNTER, 0);
        self.hpet.write(config_of(timer), config & !INTERRUPT);
        self.hpet.write(comparator_of(timer), comparator);
        self.hpet.write(config_of(timer), config);
    }

    /// The lowest pin that the timer may use and that no other device has: above the ISA ones if
    /// there is one.
    fn first_route(&self, timer: usize) -> u64 {
        let routes = self.hpet.read(config_of(timer)) >> 32;
        let high = routes & !0xFFFF;
        u64::from(if high != 0 { high } else { routes }.trailing_zeros().min(31))
    }

    fn stop(&self) {
        self.hpet.write(CONFIG, 0);
    }

    fn run_for(&self, counts: u64) {
        self.run_under(0, counts);
    }

    /// Lets the counter run for at least so many counts.
    fn run_under(&self, general: u64, counts: u64) {
        self.hpet.write(CONFIG, ENABLE | general);
        self.wait(counts + self.resolution_counts);
        self.hpet.write(CONFIG, general);
    }

    /// Lets the counter run until `done`, but at most 2 s, and then for another 3 ms: a busy host
    /// may have its timer thread wait, and what comes too much comes soon after.
    fn run_until(&self, general: u64, done: impl Fn() -> bool) {
        self.hpet.write(CONFIG, ENABLE | general);
        let start = self.hpet.read(COUNTER);
        while !done() && self.hpet.read(COUNTER).wrapping_sub(start) < 2000 * MS {
            core::hint::spin_loop();
        }
        self.wait(3 * MS);
        self.hpet.write(CONFIG, general);
    }

    fn wait(&self, counts: u64) {
        let start = self.hpet.read(COUNTER);
        while self.hpet.read(COUNTER).wrapping_sub(start) < counts {
            core::hint::spin_loop();
        }
    }

    /// Time for a counter that should stand to be caught moving.
    fn pause(&self) {
        const CYCLES: u64 = 5_000_000;
        let start = clocks::tsc();
        while clocks::tsc().wrapping_sub(start) < CYCLES {
            core::hint::spin_loop();
        }
    }
}
