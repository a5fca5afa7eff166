//! The machine: built in visible steps, then run until it ends.

use crate::acpi;
use crate::board;
use crate::boot;
use crate::cli::{HvImpl, RunOptions, Switch};
use crate::console::Console;
use crate::control::Control;
use crate::control_socket::{Server, Socket};
use crate::cpuid::Template;
use crate::discipline::Discipline;
use crate::ending::Ending;
use crate::error::{self, Error, Result};
use crate::events::{self, Timeout};
use crate::host::{self, HostKind};
use crate::housekeeping::Housekeeping;
use crate::hpet;
use crate::hyperv::HyperV;
use crate::input::{self, Input};
use crate::irqchip;
use crate::lifecycle::Lifecycle;
use crate::loader::{self, Protocol};
use crate::marks::Marks;
use crate::memory::{self, GuestMemory};
use crate::monitor::Monitor;
use crate::msr_filter;
use crate::operator::Operator;
use crate::pinning::Place;
use crate::registers::Entry;
use crate::seccomp;
use crate::serial_to;
use crate::signals::{self, Signals};
use crate::stats::VcpuStats;
use crate::stats_file::StatsFile;
use crate::terminal::Taken;
use crate::test_device;
use crate::timeline::Timeline;
use crate::timers::TimerPlan;
use crate::topology::Topology;
use crate::vcpu::{self, Peripherals};
use devices::serial::Serial;
use kvm_bindings::KVM_MAX_CPUID_ENTRIES;
use kvm_ioctls::{Cap, Kvm, VcpuFd, VmFd};
use pvclock::hyperv::{Features, cpuid_leaves};
use std::path::Path;
use std::sync::{Arc, OnceLock, mpsc};
use std::thread::{self, JoinHandle};
use vmm_sys_util::eventfd::EventFd;

/// Most vCPUs that the tables and ids here are tested for.
pub const MOST_CPUS: u32 = 1024;

/// A guest whose vCPUs stand ready.
pub struct Machine {
    // Threads first: they are gone before what they use.
    threads: Vec<JoinHandle<()>>,
    hpet: Option<hpet::Board>,
    shared: Arc<Shared>,
    console: Console,
    serial: Arc<Serial>,
    room: EventFd,
    source: serial_to::Source,
    control: Option<Socket>,
    stats_file: Option<StatsFile>,
    topology: Topology,
    vm: Arc<VmFd>,
}

/// What the vCPU threads and the main thread share.
pub struct Shared {
    /// Whether the vCPUs run.
    pub lifecycle: Arc<Lifecycle>,
    /// What exits concern.
    pub peripherals: Peripherals,
    /// Exits of each vCPU.
    pub stats: Arc<[VcpuStats]>,
    /// Moments so far.
    pub marks: Arc<Marks>,
    /// The guest's time.
    pub timeline: Arc<Timeline>,
    /// The threads that fire the guest's timers.
    pub housekeeping: Housekeeping,
    /// What the HPET counts.
    pub hpet: Option<hpet::Meters>,
    // Outlives the VM's memory slots.
    _memory: GuestMemory,
}

impl Machine {
    /// Builds the machine that `options` describe.
    ///
    /// # Errors
    /// One line that names the flag or file to change.
    pub fn build(options: &RunOptions, marks: Marks) -> Result<Self> {
        let kernel_path = options.kernel.as_deref().unwrap_or(Path::new(""));
        if !options.no_seccomp {
            seccomp::turn_on()?;
        }
        let stats_file = options.stats.as_deref().map(StatsFile::open).transpose()?;
        let (output, source) = serial_to::open(&options.serial)?;
        let marks = Arc::new(marks);
        let control = options.control.as_deref().map(Socket::bind).transpose()?;

        // KVM, and what it can do.
        let kvm = host::open_kvm()?;
        let topology = options.topology()?;
        let most_id = check_cpus(&topology, &kvm)?;
        let cpus = topology.cpus() as u32;
        let features = hyperv_features(options, &kvm)?;
        let user_hyperv = features.is_some() && options.hv_impl != HvImpl::Kernel;
        let timers = TimerPlan::new(options, cpus, &kvm)?;
        let vm = kvm.create_vm().map_err(|e| Error::new(format!("/dev/kvm: no VM ({e})")))?;
        let vm = Arc::new(vm);
        irqchip::create(&vm, most_id)?;
        msr_filter::install(&vm, user_hyperv, timers.offload)?;
        marks.note("kvm ready", None);

        // Memory, and what the guest finds in it.
        let memory = memory::allocate(options.memory, options.backing())?;
        let free_slot = memory::register(&vm, &memory)?;
        marks.note("memory", None);
        let kernel = loader::load_kernel(&memory, kernel_path, options.boot)?;
        let cmdline = loader::cmdline(&kernel, kernel_path, options.cmdline.as_deref())?;
        let initrd = match &options.initrd {
            Some(path) => Some(loader::load_initrd(&memory, &kernel, path)?),
            None if options.debug_exit && matches!(kernel.protocol, Protocol::Multiboot) => {
                Some(loader::load_environment(&memory, &kernel, cpus, options.memory)?)
            }
            None => None,
        };
        let entry = boot::hand_over(&memory, options.memory, &kernel, &cmdline, initrd)?;
        marks.note("kernel loaded", None);
        if kernel.is_bzimage() && HostKind::detect() == HostKind::Software {
            log::warn!(
                "this host's KVM has no VMX or SVM and interprets the guest's kernel: a stock Linux \
                 stops early here; run it on another host, or in resources/lab"
            );
        }

        // The boot vCPU comes first: it tells how the guest's TSC runs.
        let lifecycle = Arc::new(Lifecycle::new(cpus as usize)?);
        let boot = create_vcpu(&vm, topology.apic_id(0))?;
        let tsc_hz = u64::from(boot.get_tsc_khz().unwrap_or(0)) * 1000;
        let wanted = crate::tsc::read().wrapping_neg();
        let offset = match vcpu::place_tsc(&boot, wanted) {
            Ok(offset) => offset,
            Err(_) if user_hyperv => {
                return Err(Error::new(
                    "--hv-tsc-page: this host's KVM does not tell where a guest's TSC stands \
                     (KVM_VCPU_TSC_OFFSET, Linux 5.16); use --hv-impl kernel",
                ));
            }
            Err(_) if timers.offload => {
                return Err(Error::new(
                    "--lapic-timer offload: this host's KVM does not tell where a guest's TSC \
                     stands (KVM_VCPU_TSC_OFFSET, Linux 5.16); use --lapic-timer kernel",
                ));
            }
            Err(_) => wanted,
        };
        let timeline = Arc::new(Timeline::start(tsc_hz, offset)?);
        let hyperv_leaves = features.map(|f| cpuid_leaves(&f, cpus));
        let supported = kvm
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .map_err(|e| Error::new(format!("/dev/kvm: KVM_GET_SUPPORTED_CPUID fails ({e})")))?;
        let template = Template::new(
            &supported,
            topology,
            kvm.check_extension(Cap::TscDeadlineTimer),
            hyperv_leaves.as_deref(),
        );

        // Devices.
        let console = Console::start(output)?;
        let room = input::room_signal()?;
        let serial = board::serial_port(&vm, &console, &room, &marks)?;
        let hpet = hpet::Board::build(
            options,
            &vm,
            free_slot,
            timers.hpet.clone(),
            &lifecycle,
            &timeline,
        )?;
        let hpet_id = hpet.as_ref().map(hpet::Board::id);
        acpi::write(&memory, &acpi::Machine { topology, hpet_id }).map_err(Error::new)?;
        let counted = Arc::new(OnceLock::new());
        let (mut ports, mut mmio) = board::buses(&serial, &lifecycle, &timeline, &marks, &counted);
        if options.debug_exit {
            ports.extend(test_device::ports(&vm, &lifecycle, &console));
            mmio.push(test_device::memory());
        }
        mmio.extend(hpet.as_ref().map(hpet::Board::range));
        let (ports, mmio) = (board::bus(ports)?, board::bus(mmio)?);
        let stats: Arc<[VcpuStats]> =
            (0..cpus).map(|_| VcpuStats::new(ports.names().len(), mmio.names().len())).collect();
        let _ = counted.set(stats.clone());
        let stimer_lines = timers.stimer_lines(&vm, topology);
        let hyperv = features
            .filter(|_| user_hyperv)
            .map(|f| HyperV::new(f, stimer_lines, timeline.clone(), memory.clone()));
        let lapic_timers = timers.lapic_timers(&vm, topology, &timeline);
        let places = timers.places.clone();
        let housekeeping = timers.start(
            hyperv.as_ref(),
            &lapic_timers,
            hpet.as_ref().map(hpet::Board::timers),
            &timeline,
        )?;
        let shared = Arc::new(Shared {
            lifecycle,
            peripherals: Peripherals { ports, mmio, hyperv, lapic_timers },
            stats,
            marks,
            timeline,
            housekeeping,
            hpet: hpet.as_ref().map(hpet::Board::meters),
            _memory: memory,
        });

        // Threads, each of which makes its own vCPU.
        let mut boot = Some((boot, entry));
        let seed = VcpuSeed { vm: vm.clone(), template: Arc::new(template), topology, offset };
        let (ready, when_ready) = mpsc::channel();
        let mut threads = Vec::with_capacity(cpus as usize);
        for (index, place) in (0..cpus).zip(places) {
            let thread =
                spawn_vcpu(index, place, boot.take(), seed.clone(), shared.clone(), ready.clone());
            threads.push(thread?);
        }
        drop(ready);
        for outcome in when_ready.iter() {
            if let Err(e) = outcome {
                shared.lifecycle.end(Ending::Refused(e.to_string()));
                return Err(e);
            }
        }
        shared.marks.note("vcpus ready", None);
        Ok(Self {
            threads,
            hpet,
            shared,
            console,
            serial,
            room,
            source,
            control,
            stats_file,
            topology,
            vm,
        })
    }

    /// Lets the guest run until it, a person or a fault ends it.
    ///
    /// # Errors
    /// What the host refuses at the start, or a statistics file that cannot be written.
    pub fn run(mut self, options: &RunOptions) -> Result<Ending> {
        let lifecycle = &self.shared.lifecycle;
        let room = self.room.try_clone().map_err(|e| Error::new(format!("an eventfd ({e})")))?;
        let mut subscribers: Vec<events::Subscriber> =
            vec![Arc::new(Signals::block(self.shared.clone(), room)?)];
        let control = Control::new(self.shared.clone(), self.vm.clone(), self.topology);
        let terminal = self.source.operator.then(Taken::now);
        if let Some(reader) = self.source.reader.take() {
            let operator = terminal
                .is_some()
                .then(|| Operator::new(self.console.writer(), Monitor::new(control.clone())));
            subscribers.push(Arc::new(Input::new(
                reader,
                operator,
                self.serial.clone(),
                self.room,
            )));
        }
        if let Some(after) = options.timeout {
            subscribers.push(Arc::new(Timeout::start(after, lifecycle.clone())?));
        }
        if let Some(socket) = self.control {
            subscribers.push(Arc::new(Server::new(socket, control)));
        }
        if options.clock_discipline == Switch::On {
            subscribers.push(Arc::new(Discipline::start(self.shared.clone())?));
        }
        let events = events::Loop::new(lifecycle.clone(), subscribers)?;
        seccomp::enter(seccomp::Thread::Main);
        lifecycle.resume();
        let waited = events.run();
        if let Err(e) = &waited {
            lifecycle.end(Ending::VmmFailure(e.to_string()));
        }
        for thread in self.threads {
            let _ = thread.join();
        }
        drop(self.hpet);
        if let Some(page) = self.shared.hpet.as_ref().and_then(|meters| meters.report().page) {
            log::info!("HPET page: {page}");
        }
        let ending = lifecycle
            .ending()
            .unwrap_or_else(|| Ending::VmmFailure("the machine ended without a reason".into()));
        let lost = self.console.finish();
        self.source.drain();
        drop(terminal);
        if lost.bytes > 0 {
            log::warn!("{lost}");
        }
        if options.boot_timer {
            error::tell(self.shared.marks.table());
        }
        if let Some(file) = self.stats_file {
            file.write(&self.shared, &ending)?;
        }
        Ok(ending)
    }
}

/// Whether we and the host's KVM take so many vCPUs and such APIC ids; returns
/// the highest id.
fn check_cpus(topology: &Topology, kvm: &Kvm) -> Result<u32> {
    let cpus = topology.cpus();
    let most = (kvm.get_max_vcpus() as u64).min(u64::from(MOST_CPUS));
    if cpus > most {
        let whose =
            if most < u64::from(MOST_CPUS) { "this host's KVM_CAP_MAX_VCPUS" } else { "ours" };
        return Err(Error::new(format!("--cpus {cpus}: the most here is {most} ({whose})")));
    }
    let (id, ids) = (topology.apic_id(cpus as u32 - 1), kvm.get_max_vcpu_id());
    if id as usize >= ids {
        return Err(Error::new(format!(
            "--topology {topology}: makes APIC id {id}, and this host's KVM takes ids below {ids} \
             (KVM_CAP_MAX_VCPU_ID); powers of two of cores and threads leave no gaps"
        )));
    }
    Ok(id)
}

/// What the guest is shown of Hyper-V, if anything.
fn hyperv_features(options: &RunOptions, kvm: &Kvm) -> Result<Option<Features>> {
    if !options.hyperv() {
        return Ok(None);
    }
    if options.hv_impl == HvImpl::Kernel && !kvm.check_extension(Cap::Hyperv) {
        return Err(Error::new(
            "--hv-impl kernel: this host's KVM has no Hyper-V support; use --hv-impl user",
        ));
    }
    Ok(Some(Features {
        ref_counter: true,
        tsc_page: options.tsc_page(),
        stimer: options.hv_stimer,
        invariant_tsc: false,
    }))
}

fn create_vcpu(vm: &VmFd, apic_id: u32) -> Result<VcpuFd> {
    vm.create_vcpu(u64::from(apic_id)).map_err(|e| {
        Error::new(format!("--cpus: KVM makes no vCPU with APIC id {apic_id} ({e}); ask for fewer"))
    })
}

/// What a vCPU thread needs to make its vCPU.
#[derive(Clone)]
struct VcpuSeed {
    vm: Arc<VmFd>,
    template: Arc<Template>,
    topology: Topology,
    offset: u64,
}

impl VcpuSeed {
    /// Makes vCPU `index`, or finishes the boot vCPU that exists already.
    fn grow(&self, index: u32, boot: Option<(VcpuFd, Entry)>) -> Result<VcpuFd> {
        let (vcpu, entry) = match boot {
            Some((vcpu, entry)) => (vcpu, Some(entry)),
            None => {
                let vcpu = create_vcpu(&self.vm, self.topology.apic_id(index))?;
                if vcpu::place_tsc(&vcpu, self.offset).ok() != Some(self.offset) {
                    log::debug!("vCPU {index}: its TSC offset cannot be confirmed");
                }
                (vcpu, None)
            }
        };
        vcpu::set_up(&vcpu, index, &self.template, entry).map_err(|(step, e)| {
            Error::new(format!("/dev/kvm: vCPU {index}: {step} fails ({e})"))
        })?;
        Ok(vcpu)
    }
}

fn spawn_vcpu(
    index: u32,
    place: Place,
    boot: Option<(VcpuFd, Entry)>,
    seed: VcpuSeed,
    shared: Arc<Shared>,
    ready: mpsc::Sender<Result<()>>,
) -> Result<JoinHandle<()>> {
    thread::Builder::new()
        .name(format!("vcpu{index}"))
        .spawn(move || {
            signals::leave_to_main();
            let grown = place.take("--pin").and_then(|()| seed.grow(index, boot));
            drop(seed);
            let told = match grown {
                Ok(vcpu) => {
                    seccomp::enter(seccomp::Thread::Vcpu);
                    let told = ready.send(Ok(()));
                    drop(ready);
                    let i = index as usize;
                    let enters = || shared.marks.vcpu_enters(index, shared.stats.len());
                    let (lifecycle, peripherals) = (&shared.lifecycle, &shared.peripherals);
                    vcpu::run(vcpu, i, lifecycle, peripherals, &shared.stats[i], enters);
                    told
                }
                Err(e) => ready.send(Err(e)),
            };
            // The receiver is gone only when another vCPU failed first.
            drop(told);
        })
        .map_err(|e| {
            Error::new(format!("--cpus: the host starts no thread for vCPU {index} ({e})"))
        })
}
