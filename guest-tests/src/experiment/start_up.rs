//! `clocklab start-up`: what `vmm` itself adds before a guest runs, in time beside
//! the bare ioctls and in memory beside the guest's own.

use super::Common;
use crate::host::label;
use crate::report::{Report, figure};
use crate::vm::{Vm, VmError, sibling};
use kvm_bindings::KVM_MAX_CPUID_ENTRIES;
use kvm_ioctls::{Cap, Kvm, VcpuFd};
use serde::Serialize;
use serde_json::{Value, json};
use std::io::{self, BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Instant;
use vmm::cpuid::Template;
use vmm::registers::Entry;
use vmm::topology::Topology;

/// Limits that the project set itself.
const MOST_TIME_RATIO: f64 = 1.2;
/// vCPUs from which on that holds: the devices cost a machine of few as much.
const RATIO_FROM_CPUS: u32 = 40;
const MOST_KIB: u64 = 5 * 1024;
const MOST_KIB_PER_VCPU: f64 = 64.0;

/// Guest memory of the measured machines: a size that no other mapping has.
const MEMORY_MIB: u64 = 203;

const METHOD: &str = "vmm: from the mark \"kernel loaded\" to \"last vcpu enters\", devices and \
    tables included; bare: one thread calls the same ioctls for every vCPU, then starts a thread \
    each, to the last one's KVM_RUN; runs alternate, lowest and p50 of them. Memory: Rss of all \
    mappings but the guest's RAM (/proc/PID/smaps) once every vCPU has run and halted";

/// What to measure.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// Numbers of vCPUs, rising
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_values_t = [1, 2, 8, 40])]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub sizes: Vec<u32>,
    /// How often the time is measured
    #[arg(long, value_name = "N", default_value_t = 11, value_parser = clap::value_parser!(u32).range(1..))]
    pub runs: u32,
}

/// One number of vCPUs.
#[derive(Debug, Clone, Serialize)]
struct Row {
    cpus: u32,
    host_kind: &'static str,
    /// Lowest and p50.
    vmm_ms: [f64; 2],
    bare_ms: [f64; 2],
    /// Of the lowest: what else runs on the host only adds.
    ratio: f64,
    /// vmm's memory beyond the guest's.
    rss_kib: u64,
    /// More of it than in the first row, per vCPU more.
    kib_per_vcpu: Option<f64>,
    /// From main() to "kvm ready", and to "vcpu 0 enters"; p50.
    kvm_ready_ms: f64,
    first_entry_ms: f64,
}

/// Runs the experiment.
///
/// # Errors
/// No /dev/kvm; guests that are not built or do not come up.
pub fn run(common: &Common, options: &Options) -> Result<Report, VmError> {
    let mut rows: Vec<Row> = Vec::new();
    for &cpus in &options.sizes {
        let halt = ["--memory", &format!("{MEMORY_MIB}M"), "--cpus", &cpus.to_string()];
        let mut vm = common.bare("guest-end", &[&halt[..], &["--cmdline", "how=halt"]].concat())?;
        // The boundaries are marks of the start; the guest does nothing and is stopped.
        vm.arguments.extend(["--timeout".into(), "0.3".into()]);
        let (mut ours, mut bare, mut ready, mut entry) = (vec![], vec![], vec![], vec![]);
        let mut kind = None;
        for _ in 0..options.runs {
            bare.push(floor_ms(cpus).map_err(|e| VmError::Host("/dev/kvm".into(), e))?);
            let ran = vm.run()?;
            let at = |name| {
                mark_ms(&ran.stats, name)
                    .ok_or_else(|| vm.unexpected(&ran, format!("no mark \"{name}\"")))
            };
            ours.push(at("last vcpu enters")? - at("kernel loaded")?);
            ready.push(at("kvm ready")?);
            entry.push(at("vcpu 0 enters")?);
            kind = Some(ran.kind);
        }
        let rss_kib = rss_kib(&vm, cpus)?;
        let (vmm_ms, bare_ms) = (lowest_and_p50(ours), lowest_and_p50(bare));
        let kib_per_vcpu = rows
            .first()
            .filter(|first| cpus > first.cpus)
            .map(|first| (rss_kib as f64 - first.rss_kib as f64) / f64::from(cpus - first.cpus));
        rows.push(Row {
            cpus,
            host_kind: kind.map_or("", label),
            ratio: vmm_ms[0] / bare_ms[0],
            vmm_ms,
            bare_ms,
            rss_kib,
            kib_per_vcpu,
            kvm_ready_ms: lowest_and_p50(ready)[1],
            first_entry_ms: lowest_and_p50(entry)[1],
        });
    }
    Ok(report(&rows))
}

/// The time of a mark, in ms since vmm's main().
fn mark_ms(stats: &Value, name: &str) -> Option<f64> {
    let marks = stats["marks"].as_array()?;
    let mark = marks.iter().find(|mark| mark["name"] == name)?;
    Some(mark["ns"].as_f64()? / 1e6)
}

fn lowest_and_p50(mut values: Vec<f64>) -> [f64; 2] {
    values.sort_by(f64::total_cmp);
    [values[0], values[values.len() / 2]]
}

/// The same ioctls as vmm's, straight-line: all vCPUs made by one thread, then a
/// thread each that calls KVM_RUN. In ms.
fn floor_ms(cpus: u32) -> io::Result<f64> {
    let said = |e: kvm_ioctls::Error| io::Error::from_raw_os_error(e.errno());
    let kvm = Kvm::new().map_err(said)?;
    let vm = kvm.create_vm().map_err(said)?;
    let topology = Topology::one_socket(cpus);
    vmm::irqchip::create(&vm, topology.apic_id(cpus - 1)).map_err(io::Error::other)?;
    let supported = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).map_err(said)?;
    let deadline = kvm.check_extension(Cap::TscDeadlineTimer);
    let template = Template::new(&supported, topology, deadline, None);

    let started = Instant::now();
    let mut vcpus: Vec<VcpuFd> = Vec::with_capacity(cpus as usize);
    for index in 0..cpus {
        let vcpu = vm.create_vcpu(topology.apic_id(index).into()).map_err(said)?;
        // A host that cannot tell the offset has still done the work.
        let _ = vmm::vcpu::place_tsc(&vcpu, 0);
        const ENTRY: Entry = Entry::Long64 { rip: 0x20_0000, rsi: vmm::layout::BOOT_PARAMS };
        vmm::vcpu::set_up(&vcpu, index, &template, (index == 0).then_some(ENTRY))
            .map_err(|(_, e)| said(e))?;
        vcpus.push(vcpu);
    }
    let threads: Vec<_> = vcpus.into_iter().map(|vcpu| thread::spawn(|| enter(vcpu))).collect();
    let entered = threads.into_iter().filter_map(|thread| thread.join().ok()).max();
    Ok(entered.map_or(0.0, |last| (last - started).as_secs_f64() * 1e3))
}

/// Calls KVM_RUN, which leaves at once, and returns when that was.
fn enter(mut vcpu: VcpuFd) -> Instant {
    vcpu.set_kvm_immediate_exit(1);
    let now = Instant::now();
    let _ = vcpu.run();
    now
}

/// vmm's memory beyond the guest's while all vCPUs, having run, are halted.
fn rss_kib(vm: &Vm, cpus: u32) -> Result<u64, VmError> {
    let host = |e| VmError::Host("vmm".into(), e);
    let guest = vm.files.first().map(|(_, path)| path.clone()).unwrap_or_default();
    let mut child = Command::new(sibling("vmm")?)
        .arg("--kernel")
        .arg(guest)
        .args(["--memory", &format!("{MEMORY_MIB}M"), "--cpus", &cpus.to_string()])
        .args(["--cmdline", &format!("how=halt cpus={cpus}"), "--timeout", "60"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(host)?;
    let smaps = smaps_after_first_line(&mut child);
    child.kill().and_then(|()| child.wait()).map_err(host)?;
    rss_without(&smaps.map_err(host)?, MEMORY_MIB * 1024)
        .ok_or_else(|| host(io::Error::other("smaps shows no mapping of the guest's memory")))
}

/// The guest prints its line when all its vCPUs have come.
fn smaps_after_first_line(child: &mut Child) -> io::Result<String> {
    let stdout = child.stdout.take().ok_or_else(|| io::Error::other("no pipe"))?;
    let mut line = String::new();
    if BufReader::new(stdout).read_line(&mut line)? == 0 {
        return Err(io::Error::other("the guest ended without a word"));
    }
    std::fs::read_to_string(format!("/proc/{}/smaps", child.id()))
}

/// Sum of `Rss` over all mappings but the one whose `Size` is `skip_kib`; `None`
/// if there is not exactly one such.
pub(super) fn rss_without(smaps: &str, skip_kib: u64) -> Option<u64> {
    let kib = |line: &str, key: &str| {
        line.strip_prefix(key)?.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()
    };
    let (mut size, mut sum, mut skipped) = (0, 0, 0);
    for line in smaps.lines() {
        if let Some(value) = kib(line, "Size:") {
            size = value;
        } else if let Some(rss) = kib(line, "Rss:") {
            if size == skip_kib { skipped += 1 } else { sum += rss }
        }
    }
    (skipped == 1).then_some(sum)
}

fn report(rows: &[Row]) -> Report {
    let mut report = Report::new("start-up", METHOD);
    report.rows = rows.iter().map(|row| json!(row)).collect();
    report.document = json!({
        "most_time_ratio": MOST_TIME_RATIO,
        "most_kib_at_1": MOST_KIB,
        "most_kib_per_vcpu": MOST_KIB_PER_VCPU,
    });
    let header = [
        "vCPUs",
        "host",
        "vmm ms (lowest)",
        "p50",
        "bare ms (lowest)",
        "p50",
        "ratio",
        "KiB beyond guest RAM",
        "KiB per vCPU more",
        "main to KVM ready, ms",
        "to first entry, ms",
    ];
    report.table = vec![header.map(str::to_owned).to_vec()];
    for row in rows {
        report.table.push(vec![
            row.cpus.to_string(),
            row.host_kind.into(),
            figure(row.vmm_ms[0]),
            figure(row.vmm_ms[1]),
            figure(row.bare_ms[0]),
            figure(row.bare_ms[1]),
            figure(row.ratio),
            row.rss_kib.to_string(),
            row.kib_per_vcpu.map_or("-".into(), figure),
            figure(row.kvm_ready_ms),
            figure(row.first_entry_ms),
        ]);
    }
    let verdict = |holds| if holds { "holds" } else { "FAILS" };
    if let Some(last) = rows.last() {
        let limit = if last.cpus >= RATIO_FROM_CPUS {
            verdict(last.ratio <= MOST_TIME_RATIO).to_owned()
        } else {
            format!("is for {RATIO_FROM_CPUS} and more")
        };
        report.notes.push(format!(
            "{} vCPUs start in {}x the bare ioctls' time; the limit of {MOST_TIME_RATIO} {limit}",
            last.cpus,
            figure(last.ratio)
        ));
        if let Some(kib) = last.kib_per_vcpu {
            report.notes.push(format!(
                "{} KiB per further vCPU; the limit of {MOST_KIB_PER_VCPU} {}",
                figure(kib),
                verdict(kib <= MOST_KIB_PER_VCPU)
            ));
        }
    }
    if let Some(one) = rows.iter().find(|row| row.cpus == 1) {
        report.notes.push(format!(
            "{} KiB at 1 vCPU; the limit of {MOST_KIB} {}",
            one.rss_kib,
            verdict(one.rss_kib <= MOST_KIB)
        ));
    }
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_summed_without_the_guests() {
        let smaps = "7f0-7f1 rw-p 00000000 00:00 0\nSize:               2048 kB\nRss:  12 kB\n\
                     7f2-7f3 rw-p 0 0\nSize:  1024 kB\nRss: 900 kB\nPss: 3 kB\n\
                     7f4-7f5 r-xp 0 0 /bin/vmm\nSize:  8 kB\nRss: 8 kB\n";
        assert_eq!(rss_without(smaps, 1024), Some(20));
        assert_eq!(rss_without(smaps, 4096), None);
    }

    #[test]
    fn the_limits_are_judged() {
        let row = Row {
            cpus: 40,
            host_kind: "software",
            vmm_ms: [13.0, 14.0],
            bare_ms: [10.0, 11.0],
            ratio: 1.3,
            rss_kib: 5000,
            kib_per_vcpu: Some(30.0),
            kvm_ready_ms: 1.0,
            first_entry_ms: 2.0,
        };
        let few = Row { cpus: 2, ..row };
        let notes = report(&[row]).notes;
        assert!(notes[0].ends_with("1.2 FAILS") && notes[1].ends_with("64 holds"), "{notes:?}");
        let notes = report(&[few]).notes;
        assert!(notes[0].ends_with("1.2 is for 40 and more"), "{notes:?}");
    }
}
