//! Page and MSR read from an NMI handler, while the code that it interrupts reads them too.
//!
//! The handler reads the MSR. Page reads follow in ring 3, where the handler returns to a routine
//! that runs before the interrupted code goes on, as a signal handler does: software KVM interprets
//! ring 0, a thousand times slower. An NMI that interrupts ring 0 reads the page there, 4 times.
//!
//! Words: `source=ipi|host` (ipi: another vCPU sends the NMIs, so at least two are needed; host:
//! the VMM is asked to), `ms` (1000), `reads_per_nmi` (4 page reads), `page_reads_per_msr` (256: the
//! main code reads the MSR, which is an exit, once in so many reads of the page), `gap_cycles` (0:
//! pause between two NMIs of the sender), `cpus`, `apic`.
#![no_std]
#![no_main]

use core::arch::global_asm;
use core::mem::offset_of;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use guests::apic::Delivery;
use guests::args::Args;
use guests::clocks::{self, MSR_TIME_REF_COUNT, PAGE, TscPage};
use guests::console::ResultLine;
use guests::cpu::{BLOCK_SIZE, Cpu};
use guests::fault::set_nmi_handler;
use guests::guest_main;
use guests::smp::{self, Gate};
use guests::stats::PerRead;

guest_main!(main);

const GUEST: &str = "nmi-storm";
/// Page reads of an NMI that interrupts ring 0.
const RING0_READS: u32 = 4;

unsafe extern "C" {
    fn nmi_reads();
}

/// Shared with the handler. It interrupts the only other user, so a plain load and store there
/// is atomic.
#[repr(C)]
struct Shared {
    /// No read that begins later may be below this, 100 ns units.
    floor: AtomicU64,
    page_reads: AtomicU64,
    msr_reads: AtomicU64,
    backward: AtomicU64,
    /// The page was not valid; the MSR read that follows stands for it.
    fallbacks: AtomicU64,
    /// The sequence changed during the read.
    retries: AtomicU64,
    reads_per_nmi: AtomicU32,
    /// The routine in ring 3 is under way: another NMI does not start it again.
    in_ring3: AtomicU32,
}

#[unsafe(no_mangle)]
static NMI_SHARED: Shared = Shared {
    floor: AtomicU64::new(0),
    page_reads: AtomicU64::new(0),
    msr_reads: AtomicU64::new(0),
    backward: AtomicU64::new(0),
    fallbacks: AtomicU64::new(0),
    retries: AtomicU64::new(0),
    reads_per_nmi: AtomicU32::new(0),
    in_ring3: AtomicU32::new(0),
};

static GO: Gate = Gate::closed();
static STOP: AtomicBool = AtomicBool::new(false);
static SENT: AtomicU64 = AtomicU64::new(0);
static GAP_CYCLES: AtomicU64 = AtomicU64::new(0);

global_asm!(
    ".text",
    ".macro push_seven",
    "  push rax",
    "  push rcx",
    "  push rdx",
    "  push rsi",
    "  push rdi",
    "  push r8",
    "  push r9",
    ".endm",
    ".macro pop_seven",
    "  pop r9",
    "  pop r8",
    "  pop rdi",
    "  pop rsi",
    "  pop rdx",
    "  pop rcx",
    "  pop rax",
    ".endm",
    // Page (rdi) to time (rdx), counted in Shared (rsi). TLFS 12.7.2.1: sequence, parameters,
    // TSC, sequence again.
    ".macro read_page invalid, changed",
    "  mov r8d, [rdi + {sequence}]",
    "  test r8d, r8d",
    "  jz \\invalid",
    "  mov r9, [rdi + {offset}]",
    "  lfence",
    "  rdtsc",
    "  shl rdx, 32",
    "  or rax, rdx",
    "  mul qword ptr [rdi + {scale}]",
    "  add rdx, r9",
    "  cmp r8d, [rdi + {sequence}]",
    "  jne \\changed",
    "  inc qword ptr [rsi + {page_reads}]",
    ".endm",
    ".global nmi_reads",
    "nmi_reads:",
    "  push_seven",
    "  mov rsi, rsp",
    "  and rsi, -{block}",
    "  inc qword ptr [rsi + {nmi_count}]",
    "  lea rsi, [rip + NMI_SHARED]",
    "  lea rdi, [rip + {page}]",
    "  mov ecx, {msr}",
    "  rdmsr",
    "  shl rdx, 32",
    "  or rax, rdx",
    "  inc qword ptr [rsi + {msr_reads}]",
    "  cmp rax, [rsi + {floor}]",
    "  jae 7f",
    "  inc qword ptr [rsi + {backward}]",
    "7:",
    "  mov [rsi + {floor}], rax",
    // The frame lies above the seven registers: RIP, CS, RFLAGS, RSP.
    "  test byte ptr [rsp + 7 * 8 + 8], 3",
    "  jz 1f",
    "  cmp dword ptr [rsi + {in_ring3}], 0",
    "  jne 6f",
    // Below the red zone, where the routine's `ret` finds it.
    "  mov dword ptr [rsi + {in_ring3}], 1",
    "  mov rax, [rsp + 7 * 8 + 24]",
    "  lea rax, [rax - 128 - 8]",
    "  mov rdx, [rsp + 7 * 8]",
    "  mov [rax], rdx",
    "  mov [rsp + 7 * 8 + 24], rax",
    "  lea rdx, [rip + nmi_reads_in_ring3]",
    "  mov [rsp + 7 * 8], rdx",
    "  jmp 6f",
    "1:",
    "  mov ecx, {ring0_reads}",
    "2:",
    "  read_page 5f, 4f",
    "  cmp rdx, [rsi + {floor}]",
    "  jae 3f",
    "  inc qword ptr [rsi + {backward}]",
    "3:",
    "  mov [rsi + {floor}], rdx",
    "  dec ecx",
    "  jnz 2b",
    "  jmp 6f",
    "4:",
    "  inc qword ptr [rsi + {retries}]",
    "  dec ecx",
    "  jnz 2b",
    "  jmp 6f",
    "5:",
    "  inc qword ptr [rsi + {fallbacks}]",
    "6:",
    "  pop_seven",
    "  iretq",
    // As a signal handler: on the interrupted code's stack, between two of its instructions.
    // Another NMI may come in here: the floor is therefore taken before the read.
    "nmi_reads_in_ring3:",
    "  pushfq",
    "  push_seven",
    "  push r10",
    "  lea rsi, [rip + NMI_SHARED]",
    "  lea rdi, [rip + {page}]",
    "  mov ecx, [rsi + {reads_per_nmi}]",
    "2:",
    "  mov r10, [rsi + {floor}]",
    "  read_page 5f, 4f",
    "  cmp rdx, r10",
    "  jae 3f",
    "  inc qword ptr [rsi + {backward}]",
    "3:",
    "  cmp rdx, [rsi + {floor}]",
    "  jbe 8f",
    "  mov [rsi + {floor}], rdx",
    "  jmp 8f",
    "4:",
    "  inc qword ptr [rsi + {retries}]",
    "8:",
    "  dec ecx",
    "  jnz 2b",
    "  jmp 6f",
    "5:",
    "  inc qword ptr [rsi + {fallbacks}]",
    "6:",
    "  pop r10",
    "  pop_seven",
    "  popfq",
    "  mov dword ptr [rip + NMI_SHARED + {in_ring3}], 0",
    "  ret 128",
    page = sym PAGE,
    msr = const MSR_TIME_REF_COUNT,
    block = const BLOCK_SIZE,
    nmi_count = const offset_of!(Cpu, nmi_count),
    sequence = const offset_of!(TscPage, sequence),
    scale = const offset_of!(TscPage, scale),
    offset = const offset_of!(TscPage, offset),
    ring0_reads = const RING0_READS,
    in_ring3 = const offset_of!(Shared, in_ring3),
    floor = const offset_of!(Shared, floor),
    page_reads = const offset_of!(Shared, page_reads),
    msr_reads = const offset_of!(Shared, msr_reads),
    backward = const offset_of!(Shared, backward),
    fallbacks = const offset_of!(Shared, fallbacks),
    retries = const offset_of!(Shared, retries),
    reads_per_nmi = const offset_of!(Shared, reads_per_nmi),
);

/// What the interrupted code saw.
#[derive(Debug, Default)]
struct Main {
    page_reads: u64,
    msr_reads: u64,
    backward: u64,
    fallbacks: u64,
    longest_invalid_cycles: u64,
}

fn main(args: &Args, cpu: &'static Cpu) {
    // The host may begin once the page is enabled: the handler must be ready by then.
    let per_nmi = args.number("reads_per_nmi", 4).clamp(1, 1_000_000) as u32;
    NMI_SHARED.reads_per_nmi.store(per_nmi, Ordering::Relaxed);
    set_nmi_handler(nmi_reads);
    if PAGE.enable().is_none() {
        panic!("no reference TSC page");
    }
    let Some(tsc_hz) = clocks::tsc_hz() else {
        panic!("no clock tells the TSC's frequency");
    };
    let source = args.text("source").unwrap_or("ipi");
    let by_ipi = match source {
        "ipi" => true,
        "host" => false,
        other => panic!("source={other}: ipi or host"),
    };
    GAP_CYCLES.store(args.number("gap_cycles", 0), Ordering::Relaxed);
    let duration = tsc_hz / 1000 * args.number("ms", 1000);

    let team = smp::start(args, cpu, |cpu| {
        GO.wait();
        // One sender is enough: NMIs that find one pending are merged.
        if cpu.index == 1 {
            send_nmis();
        }
    });
    if by_ipi && team.count < 2 {
        panic!("source=ipi: needs two vCPUs");
    }
    if by_ipi {
        GO.open();
    }
    let main = read_for(duration, args.number("page_reads_per_msr", 256));
    STOP.store(true, Ordering::Relaxed);
    GO.open();
    team.join();

    let nmi = &NMI_SHARED;
    let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    ResultLine::new(GUEST)
        .text("source", source)
        .number("cpus", team.count)
        .number("nmis_sent", get(&SENT))
        .number("nmis", get(&cpu.nmi_count))
        .number("nmi_page_reads", get(&nmi.page_reads))
        .number("nmi_msr_reads", get(&nmi.msr_reads))
        .number("nmi_fallbacks", get(&nmi.fallbacks))
        .number("nmi_retries", get(&nmi.retries))
        .number("main_page_reads", main.page_reads)
        .number("main_msr_reads", main.msr_reads)
        .number("main_fallbacks", main.fallbacks)
        .number("backward", get(&nmi.backward) + main.backward)
        .number(
            "longest_invalid_ns",
            PerRead { total: main.longest_invalid_cycles, reads: 1 }.to_ns(tsc_hz),
        )
        .number("last_sequence", PAGE.sequence.load(Ordering::Relaxed))
        .end();
}

fn send_nmis() {
    let boot_cpu = Cpu::at(0).apic_id.load(Ordering::Relaxed);
    let gap = GAP_CYCLES.load(Ordering::Relaxed);
    while !STOP.load(Ordering::Relaxed) {
        smp::apic().send(boot_cpu, Delivery::Nmi);
        SENT.fetch_add(1, Ordering::Relaxed);
        let start = clocks::tsc();
        while clocks::tsc().wrapping_sub(start) < gap {
            core::hint::spin_loop();
        }
    }
}

fn read_for(duration: u64, page_reads_per_msr: u64) -> Main {
    let mut main = Main::default();
    let start = clocks::tsc();
    while clocks::tsc().wrapping_sub(start) < duration {
        for _ in 0..page_reads_per_msr {
            let floor = NMI_SHARED.floor.load(Ordering::Relaxed);
            match PAGE.read() {
                Some(time) => {
                    main.page_reads += 1;
                    main.check(time, floor);
                }
                None => {
                    main.fallbacks += 1;
                    let since = clocks::tsc();
                    let mut until = since;
                    while PAGE.sequence.load(Ordering::Acquire) == 0
                        && until.wrapping_sub(since) < duration
                    {
                        until = clocks::tsc();
                    }
                    main.longest_invalid_cycles =
                        main.longest_invalid_cycles.max(until.wrapping_sub(since));
                }
            }
        }
        let floor = NMI_SHARED.floor.load(Ordering::Relaxed);
        if let Some(time) = clocks::msr() {
            main.msr_reads += 1;
            main.check(time, floor);
        }
    }
    main
}

impl Main {
    fn check(&mut self, time: u64, floor: u64) {
        self.backward += u64::from(time < floor);
        // An NMI since the read may have raised it already.
        NMI_SHARED.floor.fetch_max(time, Ordering::Relaxed);
    }
}
