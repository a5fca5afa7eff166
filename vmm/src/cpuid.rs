//! What CPUID tells each vCPU: the host's features, this machine's topology,
//! and the leaves of one hypervisor.

use crate::topology::Topology;
use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};
use pvclock::hyperv::CpuidLeaf;

/// First and last leaf that hypervisors share among themselves.
const HYPERVISOR_LEAVES: std::ops::RangeInclusive<u32> = 0x4000_0000..=0x4000_ffff;

const LEAF_1_ECX_X2APIC: u32 = 1 << 21;
const LEAF_1_ECX_TSC_DEADLINE: u32 = 1 << 24;
const LEAF_1_ECX_HYPERVISOR: u32 = 1 << 31;
const LEAF_1_EDX_HTT: u32 = 1 << 28;
/// The LAPIC timer does not stop in deep sleep: no broadcast timer is needed.
const LEAF_6_EAX_ARAT: u32 = 1 << 2;
const LEAF_8000_0001_ECX_CMP_LEGACY: u32 = 1 << 1;

/// What every vCPU of a machine has in common.
#[derive(Debug, Clone)]
pub struct Template {
    entries: Vec<kvm_cpuid_entry2>,
    topology: Topology,
}

impl Template {
    /// Starts from what the host's KVM supports. Leaves in `hyperv` replace
    /// KVM's own: a guest picks the hypervisor with the highest base, so both
    /// at once would hide ours (TLFS §2.3).
    pub fn new(
        supported: &CpuId,
        topology: Topology,
        tsc_deadline: bool,
        hyperv: Option<&[CpuidLeaf]>,
    ) -> Self {
        let mut entries: Vec<_> = supported.as_slice().to_vec();
        // Rewritten per vCPU below.
        entries.retain(|e| e.function != 0xb && e.function != 0x1f);
        if let Some(leaves) = hyperv {
            entries.retain(|e| !HYPERVISOR_LEAVES.contains(&e.function));
            entries.extend(leaves.iter().map(|l| kvm_cpuid_entry2 {
                function: l.function,
                eax: l.eax,
                ebx: l.ebx,
                ecx: l.ecx,
                edx: l.edx,
                ..Default::default()
            }));
        }
        let has_1f = entries.iter().any(|e| e.function == 0 && e.eax >= 0x1f);
        for entry in &mut entries {
            match entry.function {
                0 => entry.eax = entry.eax.max(0xb),
                1 => {
                    entry.ecx |= LEAF_1_ECX_HYPERVISOR | LEAF_1_ECX_X2APIC;
                    entry.ecx &= !LEAF_1_ECX_TSC_DEADLINE;
                    if tsc_deadline {
                        entry.ecx |= LEAF_1_ECX_TSC_DEADLINE;
                    }
                }
                6 => entry.eax |= LEAF_6_EAX_ARAT,
                _ => {}
            }
        }
        for leaf in [Some(0xb), has_1f.then_some(0x1f)].into_iter().flatten() {
            entries.extend((0..3).map(|level| topology_level(leaf, level, &topology)));
        }
        Self { entries, topology }
    }

    /// CPUID of the vCPU with this index.
    ///
    /// # Errors
    /// More entries than KVM takes.
    pub fn for_vcpu(&self, index: u32) -> Result<CpuId, vmm_sys_util::fam::Error> {
        let t = &self.topology;
        let apic_id = t.apic_id(index);
        let per_package = t.cores * t.threads;
        let core = index / t.threads % t.cores;
        let socket = index / per_package;
        let mut entries = self.entries.clone();
        for entry in &mut entries {
            match (entry.function, entry.index) {
                (1, _) => {
                    entry.ebx = entry.ebx & 0xffff
                        | (1u32 << t.package_bits()).min(255) << 16
                        | (apic_id & 0xff) << 24;
                    set(&mut entry.edx, LEAF_1_EDX_HTT, per_package > 1);
                }
                // Deterministic cache parameters: how many ids share each cache.
                (4 | 0x8000_001d, _) if entry.eax & 0x1f != 0 => {
                    let level = entry.eax >> 5 & 7;
                    let sharing =
                        if level >= 3 { 1 << t.package_bits() } else { 1 << t.thread_bits() };
                    entry.eax = entry.eax & !(0xfff << 14) | ((sharing - 1) & 0xfff) << 14;
                    if entry.function == 4 {
                        let cores = (1u32 << (t.package_bits() - t.thread_bits())).min(64);
                        entry.eax = entry.eax & !(0x3f << 26) | (cores - 1) << 26;
                    }
                }
                (0xb | 0x1f, _) => entry.edx = apic_id,
                (0x8000_0001, _) => {
                    set(&mut entry.ecx, LEAF_8000_0001_ECX_CMP_LEGACY, per_package > 1);
                }
                // AMD: threads in the package and width of its part of the id.
                (0x8000_0008, _) => {
                    entry.ecx =
                        entry.ecx & !0xf0ff | (per_package - 1).min(255) | t.package_bits() << 12;
                }
                // AMD: extended id, threads per core and core number, one node a socket.
                (0x8000_001e, _) => {
                    entry.eax = apic_id;
                    entry.ebx = (t.threads - 1) << 8 | (core & 0xff);
                    entry.ecx = socket & 0xff;
                }
                _ => {}
            }
        }
        CpuId::from_entries(&entries)
    }
}

fn set(register: &mut u32, bit: u32, on: bool) {
    if on { *register |= bit } else { *register &= !bit }
}

/// One level of the extended topology leaves (Intel SDM 2A, CPUID leaf 0BH):
/// threads of a core, cores of a package, then the end mark.
fn topology_level(leaf: u32, level: u32, t: &Topology) -> kvm_cpuid_entry2 {
    const SMT: u32 = 1 << 8;
    const CORE: u32 = 2 << 8;
    let (shift, count, kind) = match level {
        0 => (t.thread_bits(), t.threads, SMT),
        1 => (t.package_bits(), t.threads * t.cores, CORE),
        _ => (0, 0, 0),
    };
    kvm_cpuid_entry2 {
        function: leaf,
        index: level,
        flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
        eax: shift,
        ebx: count,
        ecx: kind | level,
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(function: u32, index: u32, eax: u32) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 { function, index, eax, ..Default::default() }
    }

    fn host() -> CpuId {
        CpuId::from_entries(&[
            entry(0, 0, 0xd),
            entry(1, 0, 0),
            entry(4, 0, 1 | 1 << 5),
            entry(4, 3, 3 | 3 << 5),
            entry(6, 0, 0),
            entry(0xb, 0, 99),
            entry(0x4000_0000, 0, 0x4000_0001),
            entry(0x8000_0008, 0, 0),
            entry(0x8000_001e, 0, 0),
        ])
        .unwrap()
    }

    fn find(cpuid: &CpuId, function: u32, index: u32) -> kvm_cpuid_entry2 {
        *cpuid.as_slice().iter().find(|e| e.function == function && e.index == index).unwrap()
    }

    #[test]
    fn each_vcpu_has_its_own_ids() {
        let t = Topology { sockets: 2, cores: 3, threads: 2 };
        let template = Template::new(&host(), t, true, None);
        for index in 0..12 {
            let cpuid = template.for_vcpu(index).unwrap();
            assert_eq!(find(&cpuid, 1, 0).ebx >> 24, t.apic_id(index));
            for level in 0..3 {
                assert_eq!(find(&cpuid, 0xb, level).edx, t.apic_id(index));
            }
            assert_eq!(find(&cpuid, 0x8000_001e, 0).eax, t.apic_id(index));
        }
        let cpuid = template.for_vcpu(0).unwrap();
        assert_eq!(find(&cpuid, 0xb, 0).eax, 1);
        assert_eq!(find(&cpuid, 0xb, 1).eax, 3);
        assert_eq!(find(&cpuid, 0xb, 1).ebx, 6);
        assert_eq!(find(&cpuid, 4, 0).eax >> 14 & 0xfff, 1);
        assert_eq!(find(&cpuid, 4, 3).eax >> 14 & 0xfff, 7);
        assert_eq!(find(&cpuid, 0x8000_0008, 0).ecx, 5 | 3 << 12);
    }

    #[test]
    fn one_hypervisor_shows_itself() {
        let ours = [CpuidLeaf { function: 0x4000_0000, eax: 0x4000_0006, ebx: 1, ecx: 2, edx: 3 }];
        let t = Topology::one_socket(1);
        let with = Template::new(&host(), t, false, Some(&ours)).for_vcpu(0).unwrap();
        assert_eq!(find(&with, 0x4000_0000, 0).eax, 0x4000_0006);
        let without = Template::new(&host(), t, false, None).for_vcpu(0).unwrap();
        assert_eq!(find(&without, 0x4000_0000, 0).eax, 0x4000_0001);
    }
}
