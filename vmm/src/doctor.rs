//! `vmm doctor`: what this host can do, measured where measuring is possible.

use crate::error::Result;
use crate::host::{self, HostKind};
use crate::probe;
use kvm_ioctls::{Cap, Kvm};
use serde::Serialize;
use std::fmt::Write;
use std::fs;

/// All findings.
#[derive(Debug, Serialize)]
pub struct Findings {
    /// What runs guest instructions.
    pub kind: HostKind,
    /// Processor model.
    pub cpu: String,
    /// Kernel release.
    pub kernel: String,
    /// KVM itself; `None` where /dev/kvm does not open.
    pub kvm: Option<KvmFindings>,
    /// Why not.
    pub kvm_error: Option<String>,
    /// The host's TSC.
    pub tsc: probe::Tsc,
    /// CPUs and how they are set apart.
    pub cpus: Cpus,
    /// The host kernel's own LAPIC timer offload (kvm.pi_inject_timer).
    pub pi_inject_timer: Option<i64>,
    /// Free and reserved huge pages of 2 MiB.
    pub huge_pages: HugePages,
}

/// What KVM offers.
#[derive(Debug, Serialize)]
pub struct KvmFindings {
    /// KVM_CAP_MAX_VCPUS.
    pub max_vcpus: usize,
    /// KVM_CAP_MAX_VCPU_ID: APIC ids stay below it.
    pub max_vcpu_id: usize,
    /// KVM_GET_TSC_KHZ.
    pub tsc_khz: u32,
    /// KVM_CAP_HYPERV: the kernel serves a Hyper-V clock itself (`--hv-impl kernel`).
    pub hyperv: bool,
    /// KVM_CAP_X86_USER_SPACE_MSR and KVM_CAP_X86_MSR_FILTER.
    pub msr_filter: bool,
    /// KVM_CAP_READONLY_MEM: `--hpet page`.
    pub readonly_memory: bool,
    /// KVM_CAP_SIGNAL_MSI: timers without an interrupt line.
    pub signal_msi: bool,
    /// KVM_CAP_X2APIC_API: APIC ids above 254.
    pub x2apic_api: bool,
    /// KVM_CAP_TSC_CONTROL: the guest's TSC frequency can be chosen.
    pub tsc_control: bool,
    /// KVM_CAP_TSC_DEADLINE_TIMER.
    pub tsc_deadline: bool,
    /// By experiment: does a filtered RDMSR of 0x40000020 exit to us?
    pub hyperv_msr_exits: probe::Answer,
    /// By experiment: does a filtered WRMSR of 0x6E0 exit to us (`--lapic-timer offload`)?
    pub tsc_deadline_msr_exits: probe::Answer,
    /// By experiment: does the guest's TSC stand where KVM_VCPU_TSC_OFFSET puts it?
    pub tsc_offset: probe::Offset,
}

/// CPU lists as the kernel prints them.
#[derive(Debug, Serialize)]
pub struct Cpus {
    /// Online.
    pub online: String,
    /// `isolcpus=`.
    pub isolated: String,
    /// `nohz_full=`.
    pub nohz_full: String,
}

/// Huge pages of 2 MiB.
#[derive(Debug, Serialize)]
pub struct HugePages {
    /// Reserved.
    pub total: u64,
    /// Not in use.
    pub free: u64,
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

/// Examines the host; takes about a fifth of a second.
pub fn examine() -> Findings {
    let cpuinfo = read("/proc/cpuinfo");
    let (kvm, kvm_error) = match host::open_kvm().and_then(|kvm| examine_kvm(&kvm)) {
        Ok(findings) => (Some(findings), None),
        Err(e) => (None, Some(e.to_string())),
    };
    let huge = |name| {
        read(&format!("/sys/kernel/mm/hugepages/hugepages-2048kB/{name}")).parse().unwrap_or(0)
    };
    Findings {
        kind: HostKind::detect(),
        cpu: host::cpu_model(&cpuinfo).into(),
        kernel: read("/proc/sys/kernel/osrelease"),
        kvm,
        kvm_error,
        tsc: probe::tsc(&cpuinfo),
        cpus: Cpus {
            online: read("/sys/devices/system/cpu/online"),
            isolated: read("/sys/devices/system/cpu/isolated"),
            // Prints "(null)" where nothing is set.
            nohz_full: Some(read("/sys/devices/system/cpu/nohz_full"))
                .filter(|list| !list.starts_with('('))
                .unwrap_or_default(),
        },
        pi_inject_timer: read("/sys/module/kvm/parameters/pi_inject_timer").parse().ok(),
        huge_pages: HugePages { total: huge("nr_hugepages"), free: huge("free_hugepages") },
    }
}

fn examine_kvm(kvm: &Kvm) -> Result<KvmFindings> {
    let vcpu = probe::Vcpu::new(kvm)?;
    Ok(KvmFindings {
        max_vcpus: kvm.get_max_vcpus(),
        max_vcpu_id: kvm.get_max_vcpu_id(),
        tsc_khz: vcpu.tsc_khz(),
        hyperv: kvm.check_extension(Cap::Hyperv),
        msr_filter: kvm.check_extension(Cap::X86UserSpaceMsr)
            && kvm.check_extension(Cap::X86MsrFilter),
        readonly_memory: kvm.check_extension(Cap::ReadonlyMem),
        signal_msi: kvm.check_extension(Cap::SignalMsi),
        x2apic_api: kvm.check_extension(Cap::X2ApicApi),
        tsc_control: kvm.check_extension(Cap::TscControl),
        tsc_deadline: kvm.check_extension(Cap::TscDeadlineTimer),
        hyperv_msr_exits: probe::hyperv_msr_exits(kvm),
        tsc_deadline_msr_exits: probe::tsc_deadline_msr_exits(kvm),
        tsc_offset: vcpu.offset(),
    })
}

impl Findings {
    /// The findings for a person: what, and what follows.
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        let mut line = |what: &str, value: String| {
            let _ = writeln!(text, "{what:<26} {value}");
        };
        let yes = |yes: bool| if yes { "yes" } else { "no" }.to_owned();
        line("host", format!("{}, {}, Linux {}", self.kind, self.cpu, self.kernel));
        if let Some(e) = &self.kvm_error {
            line("KVM", e.clone());
        }
        if let Some(kvm) = &self.kvm {
            line("most vCPUs", format!("{} (APIC ids below {})", kvm.max_vcpus, kvm.max_vcpu_id));
            line("Hyper-V in the kernel", format!("{} (--hv-impl kernel)", yes(kvm.hyperv)));
            line("MSR filter", format!("{} (--hv-impl user)", yes(kvm.msr_filter)));
            line("  RDMSR 0x40000020 exits", kvm.hyperv_msr_exits.to_string());
            line(
                "  WRMSR 0x6e0 exits",
                format!("{} (--lapic-timer offload)", kvm.tsc_deadline_msr_exits),
            );
            line("guest TSC offset", kvm.tsc_offset.to_string());
            line("read-only memory slots", format!("{} (--hpet page)", yes(kvm.readonly_memory)));
            line("MSI without a line", yes(kvm.signal_msi));
            line("APIC ids above 254", yes(kvm.x2apic_api));
            line("TSC deadline timer", yes(kvm.tsc_deadline));
            line("TSC scaling", yes(kvm.tsc_control));
            line("TSC by KVM", format!("{} kHz", kvm.tsc_khz));
        }
        let tsc = &self.tsc;
        line(
            "TSC measured",
            format!(
                "{:.0} Hz ± {:.2} ppm, against CLOCK_MONOTONIC_RAW over {} ms",
                tsc.hz, tsc.uncertainty_ppm, tsc.span_ms
            ),
        );
        if let Some(kvm) = &self.kvm {
            let stated = f64::from(kvm.tsc_khz) * 1000.0;
            line("  differs from KVM's by", format!("{:+.2} ppm", (tsc.hz / stated - 1.0) * 1e6));
        }
        line(
            "TSC stable",
            format!(
                "{} (constant {}, nonstop {}; host clocksource {})",
                yes(tsc.constant && tsc.nonstop),
                yes(tsc.constant),
                yes(tsc.nonstop),
                tsc.host_clocksource
            ),
        );
        let list = |list: &str| if list.is_empty() { "none".to_owned() } else { list.to_owned() };
        line("CPUs online", self.cpus.online.clone());
        line("  isolated", list(&self.cpus.isolated));
        line("  nohz_full", list(&self.cpus.nohz_full));
        line(
            "kvm.pi_inject_timer",
            self.pi_inject_timer.map_or("not there".into(), |v| match v {
                0 => "0: the host kernel does not offload LAPIC timers".into(),
                1 => "1: the host kernel offloads LAPIC timers to housekeeping CPUs".into(),
                _ => format!("{v}: on where CPUs are nohz_full"),
            }),
        );
        line(
            "huge pages of 2 MiB",
            format!("{} free of {}", self.huge_pages.free, self.huge_pages.total),
        );
        text
    }
}
