//! What one read of each clock costs, by the kernel method of the Hyper-V sched clock thread:
//! ordered RDTSC, `reads` reads, ordered RDTSC, divide; `batches` times.
//!
//! Words: `reads` (1000), `batches` (20, at most 1000), `pairs` (1000) of page ≤ MSR ≤ page.
#![no_std]
#![no_main]

use core::arch::global_asm;
use core::hint::black_box;
use core::sync::atomic::Ordering;

use guests::args::Args;
use guests::clocks::{self, Hpet, MSR_TIME_REF_COUNT, PAGE};
use guests::console::ResultLine;
use guests::cpu::Cpu;
use guests::mark::Marks;
use guests::order::PageAndMsr;
use guests::stats::Batches;
use guests::{guest_main, ring0};

guest_main!(main);

const GUEST: &str = "clock-cost";
type Cost = Batches<1000>;

unsafe extern "C" {
    fn r0_msr_batch();
    fn r0_load_batch();
}

// Both return the cycles of RSI reads. The loop is one DEC and one branch beside the read.
global_asm!(
    ".text",
    // (msr, reads)
    ".global r0_msr_batch",
    "r0_msr_batch:",
    "  mov ecx, edi",
    "  lfence",
    "  rdtsc",
    "  shl rdx, 32",
    "  or rax, rdx",
    "  mov r8, rax",
    "1:",
    "  rdmsr",
    "  dec rsi",
    "  jnz 1b",
    "  jmp batch_end",
    // (address, reads)
    ".global r0_load_batch",
    "r0_load_batch:",
    "  lfence",
    "  rdtsc",
    "  shl rdx, 32",
    "  or rax, rdx",
    "  mov r8, rax",
    "1:",
    "  mov rax, [rdi]",
    "  dec rsi",
    "  jnz 1b",
    "batch_end:",
    "  lfence",
    "  rdtsc",
    "  shl rdx, 32",
    "  or rax, rdx",
    "  sub rax, r8",
    "  ret",
);

fn main(args: &Args, _cpu: &'static Cpu) {
    let reads = args.number("reads", 1000).max(1);
    let batches = args.number("batches", 20);
    let page = PAGE.enable();
    let tsc_hz = clocks::tsc_hz();

    let marks = Marks::default();
    let report = |clock: &str, place: &str, cost: &Cost| {
        let line = ResultLine::new(GUEST)
            .text("clock", clock)
            .text("where", place)
            .number("reads_per_batch", reads)
            .number("batches", cost.count())
            .number("cycles_p50", cost.p50())
            .number("cycles_min", cost.min())
            .number("cycles_max", cost.max())
            // One batch more: the first is not measured, but it is between the marks.
            .number("reads", reads * (cost.count() as u64 + 1))
            .number("first_mark", marks.last_pair());
        match tsc_hz {
            Some(hz) => line.number("ns_p50", cost.p50().to_ns(hz)),
            None => line,
        }
        .end();
    };
    let in_ring3 = |clock: &str, read: &mut dyn FnMut(u64)| {
        marks.next();
        let cost = Cost::run(batches, reads, |reads| {
            let start = clocks::tsc();
            read(reads);
            clocks::tsc().wrapping_sub(start)
        });
        marks.next();
        report(clock, "guest-user", &cost);
    };
    let in_ring0 = |clock: &str, routine: unsafe extern "C" fn(), argument: u64| {
        marks.next();
        let cost = Cost::run(batches, reads, |reads| {
            // SAFETY: one of the routines above with its two arguments; what it reads was probed.
            unsafe { ring0::call(routine, [argument, reads, 0]) }.0
        });
        marks.next();
        report(clock, "guest-kernel", &cost);
    };

    in_ring3("tsc", &mut |reads| {
        for _ in 0..reads {
            black_box(clocks::tsc());
        }
    });
    if page.is_some() {
        ResultLine::new(GUEST)
            .text("page", "parameters")
            .number("sequence", PAGE.sequence.load(Ordering::Relaxed))
            .number("scale", PAGE.scale.load(Ordering::Relaxed))
            .number("offset", PAGE.offset.load(Ordering::Relaxed))
            .number("tsc_hz", tsc_hz.unwrap_or(0))
            .end();
        if PAGE.read().is_some() {
            in_ring3("page", &mut |reads| {
                for _ in 0..reads {
                    black_box(PAGE.read());
                }
            });
        }
    }
    if clocks::msr().is_some() {
        in_ring0("msr", r0_msr_batch, MSR_TIME_REF_COUNT.into());
        if PAGE.read().is_some() {
            PageAndMsr::check(args.number("pairs", 1000)).report(GUEST, "untouched");
        }
    }
    if let Some(hpet) = Hpet::find() {
        in_ring3("hpet", &mut |reads| {
            for _ in 0..reads {
                black_box(hpet.counter());
            }
        });
        in_ring0("hpet", r0_load_batch, Hpet::COUNTER_ADDRESS);
    }
    if clocks::pm_timer().is_some() {
        in_ring3("acpi_pm", &mut |reads| {
            for _ in 0..reads {
                black_box(clocks::pm_timer());
            }
        });
    }
}
