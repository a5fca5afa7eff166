//! The floor: a `KVM_RUN` loop that answers the clock reads and nothing else.
//!
//! It boots the same ELF64 images as `vmm` does, in the same state, so that one guest measured
//! under both gives the price of everything `vmm` adds to the exit itself. It is deliberately
//! straight-line code: no device model, no bus, no statistics, no way to stop early.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use kvm_bindings::{
    CpuId, KVM_CAP_X2APIC_API, KVM_CAP_X86_USER_SPACE_MSR, KVM_MAX_CPUID_ENTRIES,
    KVM_X2APIC_API_DISABLE_BROADCAST_QUIRK, KVM_X2APIC_API_USE_32BIT_IDS, kvm_enable_cap,
    kvm_segment, kvm_userspace_memory_region,
};
use kvm_ioctls::{
    Kvm, MsrExitReason, MsrFilterDefaultAction, MsrFilterRange, MsrFilterRangeFlags, VcpuExit,
    VcpuFd, VmFd,
};
use linux_loader::loader::{Elf, KernelLoader};
use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

/// What to boot.
#[derive(Debug, Clone)]
pub struct BareConfig {
    /// An ELF64 guest.
    pub kernel: PathBuf,
    /// Its command line, at most 2047 bytes.
    pub cmdline: String,
    /// vCPUs, 1..=1024 (or the host's limit).
    pub cpus: u32,
    /// Guest RAM in MiB, 16..=3072: one slot from address 0.
    pub memory_mib: u64,
}

/// How the run ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BareEnd {
    /// The guest wrote SLP_EN to the PM1 control port.
    PowerOff,
    /// The guest pulsed the reset line of the keyboard controller.
    Reboot,
    /// Triple fault.
    Shutdown,
    /// KVM gave up, or an exit that this loop has no answer for.
    Broken(String),
}

/// A finished run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BareRun {
    /// How it ended.
    pub end: BareEnd,
    /// From before the first `KVM_CREATE_VCPU` to the last vCPU's first `KVM_RUN`; `None` if the
    /// guest ended before that.
    pub vcpus_started: Option<Duration>,
}

/// What went wrong before the guest ran.
#[derive(Debug, thiserror::Error)]
pub enum BareError {
    /// A KVM ioctl failed.
    #[error("{0}: {1}")]
    Kvm(&'static str, kvm_ioctls::Error),
    /// The image could not be opened.
    #[error("{0}: {1}")]
    Open(PathBuf, io::Error),
    /// The image could not be loaded.
    #[error("{0}: {1}")]
    Load(PathBuf, linux_loader::loader::Error),
    /// Guest memory could not be mapped or does not hold what is put there.
    #[error("guest memory: {0}")]
    Memory(String),
    /// A vCPU thread could not be started.
    #[error("vCPU thread: {0}")]
    Thread(io::Error),
}

const PML4: u64 = 0x9000;
const GDT: u64 = 0x500;
const ZERO_PAGE: u64 = 0x7000;
const CMDLINE: u64 = 0x20000;
const CMDLINE_MAX: usize = 2047;

const COM1: u16 = 0x3F8;
const I8042_COMMAND: u16 = 0x64;
const PM1A_CNT: u16 = 0x604;
const PM_TIMER: u16 = 0x608;
const HPET: u64 = 0xFED0_0000;

const MSR_GUEST_OS_ID: u32 = 0x4000_0000;
const MSR_TIME_REF_COUNT: u32 = 0x4000_0020;
const MSR_REFERENCE_TSC: u32 = 0x4000_0021;
const MSR_TSC_FREQUENCY: u32 = 0x4000_0022;

/// Guest clocks as multiples of the TSC: `(tsc * scale) >> 64`, from TSC zero. No offset and no
/// discipline: a floor has one VM, and it is new.
#[derive(Debug, Clone, Copy)]
struct Clocks {
    tsc_hz: u64,
    scale_100ns: u64,
    scale_10ns: u64,
    scale_pm_timer: u64,
}

impl Clocks {
    fn new(tsc_hz: u64) -> Self {
        let scale = |hz: u128| ((hz << 64) / u128::from(tsc_hz)) as u64;
        Self {
            tsc_hz,
            scale_100ns: scale(10_000_000),
            scale_10ns: scale(100_000_000),
            scale_pm_timer: scale(3_579_545),
        }
    }

    fn now(scale: u64) -> u64 {
        // SAFETY: RDTSC has no effect on memory and cannot fault in user mode on Linux unless
        // the process asked for it (PR_SET_TSC), which we do not.
        let tsc = unsafe { core::arch::x86_64::_rdtsc() };
        ((u128::from(tsc) * u128::from(scale)) >> 64) as u64
    }
}

/// Boots `config` and copies the guest's console to `console` until the guest ends.
///
/// The other vCPUs' threads stay inside `KVM_RUN` until the process exits: call this once per
/// process.
///
/// # Errors
/// Whatever keeps the guest from starting. A guest that starts and fails is a [`BareEnd`].
pub fn run(config: &BareConfig, console: &mut dyn Write) -> Result<BareRun, BareError> {
    let kvm = Kvm::new().map_err(|e| BareError::Kvm("/dev/kvm", e))?;
    let vm = kvm.create_vm().map_err(|e| BareError::Kvm("KVM_CREATE_VM", e))?;
    let memory = map_memory(&vm, config.memory_mib)?;
    let entry = load(&memory, &config.kernel, &config.cmdline)?;
    configure(&vm, config.cpus)?;

    let supported = kvm
        .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(|e| BareError::Kvm("KVM_GET_SUPPORTED_CPUID", e))?;
    let started = Instant::now();
    let mut vcpus = Vec::new();
    for id in 0..config.cpus {
        let vcpu = vm.create_vcpu(id.into()).map_err(|e| BareError::Kvm("KVM_CREATE_VCPU", e))?;
        vcpu.set_cpuid2(&cpuid_for(&supported, id, config.cpus))
            .map_err(|e| BareError::Kvm("KVM_SET_CPUID2", e))?;
        if id == 0 {
            enter_long_mode(&vcpu, entry).map_err(|e| BareError::Kvm("KVM_SET_SREGS", e))?;
        }
        vcpus.push(vcpu);
    }
    let tsc_khz = vcpus[0].get_tsc_khz().map_err(|e| BareError::Kvm("KVM_GET_TSC_KHZ", e))?;
    let clocks = Clocks::new(u64::from(tsc_khz) * 1000);

    let (events, inbox) = mpsc::channel();
    // Nobody needs the threads' handles: the end arrives as a message.
    let stopped = Arc::new(AtomicBool::new(false));
    for (id, vcpu) in vcpus.into_iter().enumerate() {
        let (memory, events, stopped) = (memory.clone(), events.clone(), stopped.clone());
        thread::Builder::new()
            .name(format!("vcpu{id}"))
            .spawn(move || {
                let _ = events.send(Event::Started(Instant::now()));
                let end = run_vcpu(vcpu, &memory, clocks, &events, &stopped);
                let _ = events.send(Event::End(end));
            })
            .map_err(BareError::Thread)?;
    }
    let mut starting = config.cpus;
    let mut last_start = started;
    for event in inbox {
        match event {
            Event::Started(at) => {
                starting -= 1;
                last_start = last_start.max(at);
            }
            // A console that is gone is no reason to stop a guest that only measures.
            Event::Console(byte) => drop(console.write_all(&[byte])),
            Event::End(end) => {
                stopped.store(true, Ordering::Relaxed);
                let _ = console.flush();
                let vcpus_started = (starting == 0).then(|| last_start - started);
                return Ok(BareRun { end, vcpus_started });
            }
        }
    }
    Ok(BareRun { end: BareEnd::Broken("no vCPU is left".into()), vcpus_started: None })
}

enum Event {
    /// A thread is about to enter the guest for the first time.
    Started(Instant),
    Console(u8),
    End(BareEnd),
}

/// The loop whose price is the floor.
fn run_vcpu(
    mut vcpu: VcpuFd,
    memory: &GuestMemoryMmap,
    clocks: Clocks,
    events: &mpsc::Sender<Event>,
    stopped: &AtomicBool,
) -> BareEnd {
    while !stopped.load(Ordering::Relaxed) {
        match vcpu.run() {
            Ok(VcpuExit::X86Rdmsr(msr)) => match msr.index {
                MSR_TIME_REF_COUNT => *msr.data = Clocks::now(clocks.scale_100ns),
                MSR_TSC_FREQUENCY => *msr.data = clocks.tsc_hz,
                _ => *msr.error = 1,
            },
            Ok(VcpuExit::MmioRead(address, data)) => {
                data.fill(0);
                let value = match address.wrapping_sub(HPET) {
                    // 10 ns period, 64-bit counter; enabled from the start.
                    0x000 => 10_000_000_u64 << 32 | 1 << 13,
                    0x010 => 1,
                    0x0F0 => Clocks::now(clocks.scale_10ns),
                    _ => u64::MAX,
                };
                let n = data.len().min(8);
                data[..n].copy_from_slice(&value.to_le_bytes()[..n]);
            }
            Ok(VcpuExit::IoIn(port, data)) => {
                data.fill(0xFF);
                if port == PM_TIMER && data.len() == 4 {
                    let ticks = Clocks::now(clocks.scale_pm_timer) as u32;
                    data.copy_from_slice(&ticks.to_le_bytes());
                }
            }
            Ok(VcpuExit::IoOut(COM1, data)) => {
                for &byte in data {
                    let _ = events.send(Event::Console(byte));
                }
            }
            Ok(VcpuExit::IoOut(PM1A_CNT, [_, high])) if high & 0x20 != 0 => {
                return BareEnd::PowerOff;
            }
            Ok(VcpuExit::IoOut(I8042_COMMAND, [0xFE])) => return BareEnd::Reboot,
            Ok(VcpuExit::IoOut(..) | VcpuExit::MmioWrite(..) | VcpuExit::Hlt) => {}
            Ok(VcpuExit::X86Wrmsr(msr)) => match msr.index {
                MSR_GUEST_OS_ID => {}
                MSR_REFERENCE_TSC => {
                    if msr.data & 1 != 0 && publish_page(memory, msr.data & !0xFFF, clocks).is_err()
                    {
                        *msr.error = 1;
                    }
                }
                _ => *msr.error = 1,
            },
            Ok(VcpuExit::Shutdown) => return BareEnd::Shutdown,
            Ok(VcpuExit::InternalError) => return internal_error(&vcpu),
            Ok(other) => return BareEnd::Broken(format!("{other:?}")),
            Err(e) if [libc::EINTR, libc::EAGAIN].contains(&e.errno()) => {}
            Err(e) => return BareEnd::Broken(format!("KVM_RUN: {e}")),
        }
    }
    BareEnd::Broken("stopped".into())
}

fn internal_error(vcpu: &VcpuFd) -> BareEnd {
    let rip = vcpu.get_regs().map_or(0, |r| r.rip);
    BareEnd::Broken(format!("KVM internal error at RIP {rip:#x}"))
}

/// TLFS 12.7.2: sequence, scale and offset of the reference TSC page.
fn publish_page(
    memory: &GuestMemoryMmap,
    gpa: u64,
    clocks: Clocks,
) -> Result<(), vm_memory::GuestMemoryError> {
    let page = GuestAddress(gpa);
    memory.write_slice(&[0; 4096], page)?;
    memory.write_obj(clocks.scale_100ns, page.unchecked_add(8))?;
    memory.store(1_u32, page, Ordering::Release)
}

fn map_memory(vm: &VmFd, mib: u64) -> Result<GuestMemoryMmap, BareError> {
    let size = usize::try_from(mib << 20).map_err(|e| BareError::Memory(e.to_string()))?;
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), size)])
        .map_err(|e| BareError::Memory(e.to_string()))?;
    let host =
        memory.get_host_address(GuestAddress(0)).map_err(|e| BareError::Memory(e.to_string()))?;
    let region = kvm_userspace_memory_region {
        slot: 0,
        flags: 0,
        guest_phys_addr: 0,
        memory_size: size as u64,
        userspace_addr: host as u64,
    };
    // SAFETY: the region is exactly the mapping that `memory` owns. Every vCPU thread, the only
    // user of the VM after `run` returns, holds a clone of `memory` as long as its vCPU.
    unsafe { vm.set_user_memory_region(region) }
        .map_err(|e| BareError::Kvm("KVM_SET_USER_MEMORY_REGION", e))?;
    Ok(memory)
}

/// Loads the image, the zero page and the tables; returns the entry point.
fn load(memory: &GuestMemoryMmap, kernel: &Path, cmdline: &str) -> Result<u64, BareError> {
    let mut image = File::open(kernel).map_err(|e| BareError::Open(kernel.into(), e))?;
    let loaded =
        Elf::load(memory, None, &mut image, None).map_err(|e| BareError::Load(kernel.into(), e))?;
    if cmdline.len() > CMDLINE_MAX {
        return Err(BareError::Memory(format!("command line over {CMDLINE_MAX} bytes")));
    }
    let write = |address: u64, bytes: &[u8]| {
        memory
            .write_slice(bytes, GuestAddress(address))
            .map_err(|e| BareError::Memory(e.to_string()))
    };
    write(CMDLINE, cmdline.as_bytes())?;
    write(ZERO_PAGE + 0x228, &(CMDLINE as u32).to_le_bytes())?;

    // Identity map of 4 GiB: PML4, PDPT, four page directories of 2 MiB pages.
    write(PML4, &((PML4 + 0x1000) | 3).to_le_bytes())?;
    for gib in 0..4 {
        write(PML4 + 0x1000 + gib * 8, &((PML4 + 0x2000 + gib * 0x1000) | 3).to_le_bytes())?;
    }
    for index in 0..2048_u64 {
        write(PML4 + 0x2000 + index * 8, &(index << 21 | 0x83).to_le_bytes())?;
    }
    // The flat segments of the Linux 64-bit boot protocol: CS 0x10, DS 0x18.
    write(GDT + 0x10, &0x00AF_9B00_0000_FFFF_u64.to_le_bytes())?;
    write(GDT + 0x18, &0x00CF_9300_0000_FFFF_u64.to_le_bytes())?;
    Ok(loaded.kernel_load.raw_value())
}

/// Interrupt controllers as `vmm` has them, and the MSR exits.
fn configure(vm: &VmFd, cpus: u32) -> Result<(), BareError> {
    let enable = |what: &'static str, cap: u32, argument: u64| {
        let cap = kvm_enable_cap { cap, args: [argument, 0, 0, 0], ..Default::default() };
        vm.enable_cap(&cap).map_err(|e| BareError::Kvm(what, e))
    };
    vm.create_irq_chip().map_err(|e| BareError::Kvm("KVM_CREATE_IRQCHIP", e))?;
    if cpus > 255 {
        let flags = KVM_X2APIC_API_USE_32BIT_IDS | KVM_X2APIC_API_DISABLE_BROADCAST_QUIRK;
        enable("KVM_CAP_X2APIC_API", KVM_CAP_X2APIC_API, flags.into())?;
    }
    let reasons = MsrExitReason::Filter | MsrExitReason::Unknown | MsrExitReason::Inval;
    enable("KVM_CAP_X86_USER_SPACE_MSR", KVM_CAP_X86_USER_SPACE_MSR, reasons.bits().into())?;
    let denied = MsrFilterRange {
        flags: MsrFilterRangeFlags::READ | MsrFilterRangeFlags::WRITE,
        base: MSR_GUEST_OS_ID,
        msr_count: 64,
        bitmap: &[0; 8],
    };
    vm.set_msr_filter(MsrFilterDefaultAction::ALLOW, &[denied])
        .map_err(|e| BareError::Kvm("KVM_X86_SET_MSR_FILTER", e))
}

/// The host's CPUID with this vCPU's APIC id in leaves 1, 0xB and 0x1F.
fn cpuid_for(supported: &CpuId, id: u32, cpus: u32) -> CpuId {
    let mut cpuid = supported.clone();
    for entry in cpuid.as_mut_slice() {
        match entry.function {
            1 => {
                entry.ebx = (entry.ebx & 0xFFFF) | cpus.min(255) << 16 | (id & 0xFF) << 24;
                entry.ecx |= 1 << 31;
            }
            0xB | 0x1F => entry.edx = id,
            _ => {}
        }
    }
    cpuid
}

fn enter_long_mode(vcpu: &VcpuFd, entry: u64) -> Result<(), kvm_ioctls::Error> {
    let mut sregs = vcpu.get_sregs()?;
    let segment = |selector, type_, l, db| kvm_segment {
        base: 0,
        limit: 0xFFFF_FFFF,
        selector,
        type_,
        present: 1,
        dpl: 0,
        db,
        s: 1,
        l,
        g: 1,
        ..Default::default()
    };
    sregs.cs = segment(0x10, 0xB, 1, 0);
    let data = segment(0x18, 0x3, 0, 1);
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.gdt.base = GDT;
    sregs.gdt.limit = 0x1F;
    sregs.idt.limit = 0;
    sregs.cr0 = 0x8000_0033; // PG | NE | ET | MP | PE
    sregs.cr3 = PML4;
    sregs.cr4 = 1 << 5; // PAE
    sregs.efer = 1 << 10 | 1 << 8; // LMA | LME
    vcpu.set_sregs(&sregs)?;
    let mut regs = vcpu.get_regs()?;
    regs.rip = entry;
    regs.rsi = ZERO_PAGE;
    regs.rflags = 2;
    vcpu.set_regs(&regs)
}
