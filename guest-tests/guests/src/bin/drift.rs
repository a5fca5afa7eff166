//! Reads every clock just before and just after a write to the mark port, again and again: the
//! VMM notes the host's time with each mark, so the host's clock lies between the two readings.
//!
//! Words: `samples` (10), `period_ms` (1000), `wait=halt|spin` (halt; `spin` keeps all vCPUs
//! computing between samples), `cpus`, `apic`.
#![no_std]
#![no_main]

use core::sync::atomic::{AtomicBool, Ordering};

use guests::args::Args;
use guests::clocks::{self, Hpet, PAGE};
use guests::console::ResultLine;
use guests::cpu::Cpu;
use guests::entry::TIMER_VECTOR;
use guests::mark::Marks;
use guests::{guest_main, ring0, smp};

guest_main!(main);

const GUEST: &str = "drift";
const MSR_TSC_DEADLINE: u32 = 0x6E0;
/// SDM vol. 3, 11.5.4.1: bits 18:17 of the timer's entry.
const TSC_DEADLINE_MODE: u32 = 2 << 17;

static SPIN: AtomicBool = AtomicBool::new(false);
static DONE: AtomicBool = AtomicBool::new(false);

/// What all clocks said at one time. The page, read last before the mark and first after it, has
/// the tightest bracket.
#[derive(Debug, Clone, Copy)]
struct Readings {
    tsc: u64,
    hpet: Option<u64>,
    pm: Option<u32>,
    msr: Option<u64>,
    page: Option<u64>,
}

impl Readings {
    fn before(hpet: Option<Hpet>) -> Self {
        let pm = clocks::pm_timer();
        let hpet = hpet.map(Hpet::counter);
        let msr = clocks::msr();
        Self { pm, hpet, msr, tsc: clocks::tsc(), page: PAGE.read() }
    }

    fn after(hpet: Option<Hpet>) -> Self {
        let page = PAGE.read();
        let tsc = clocks::tsc();
        let msr = clocks::msr();
        let hpet = hpet.map(Hpet::counter);
        Self { tsc, page, msr, hpet, pm: clocks::pm_timer() }
    }
}

fn main(args: &Args, cpu: &'static Cpu) {
    // Without a page there are other clocks to read.
    let _ = PAGE.enable();
    let Some(tsc_hz) = clocks::tsc_hz() else {
        panic!("no clock tells the TSC's frequency");
    };
    let hpet = Hpet::find();
    let spin = match args.text("wait").unwrap_or("halt") {
        "halt" => false,
        "spin" => true,
        other => panic!("wait={other}: halt or spin"),
    };
    SPIN.store(spin, Ordering::Relaxed);
    let samples = args.number("samples", 10);
    let period = tsc_hz / 1000 * args.number("period_ms", 1000);

    let team = smp::start(args, cpu, |_| {
        while SPIN.load(Ordering::Relaxed) && !DONE.load(Ordering::Relaxed) {
            core::hint::spin_loop();
        }
    });
    smp::apic().set_timer_entry(TSC_DEADLINE_MODE | u32::from(TIMER_VECTOR));
    let marks = Marks::default();
    let start = clocks::tsc();
    for sample in 0..samples {
        let deadline = start + sample * period;
        if spin {
            while clocks::tsc() < deadline {
                core::hint::spin_loop();
            }
        } else if clocks::tsc() < deadline {
            sleep_until(cpu, deadline);
        }
        let before = Readings::before(hpet);
        marks.next();
        let after = Readings::after(hpet);
        report(sample, before, after);
    }
    DONE.store(true, Ordering::Relaxed);
    team.join();
}

fn sleep_until(cpu: &'static Cpu, deadline: u64) {
    while clocks::tsc() < deadline {
        let seen = cpu.irq_count.load(Ordering::Acquire);
        if ring0::wrmsr(MSR_TSC_DEADLINE, deadline).is_none() {
            panic!("wait=halt: no IA32_TSC_DEADLINE");
        }
        ring0::wait_irq(&cpu.irq_count, seen);
    }
}

fn report(sample: u64, before: Readings, after: Readings) {
    let mut line = ResultLine::new(GUEST).number("sample", sample);
    let clocks = [
        ("tsc", Some(before.tsc), Some(after.tsc)),
        ("page", before.page, after.page),
        ("msr", before.msr, after.msr),
        ("hpet", before.hpet, after.hpet),
        ("acpi_pm", before.pm.map(u64::from), after.pm.map(u64::from)),
    ];
    for (name, before, after) in clocks {
        if let (Some(before), Some(after)) = (before, after) {
            line = line.list(name, [before, after]);
        }
    }
    line.end();
}
