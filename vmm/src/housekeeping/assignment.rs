//! Which housekeeping thread serves which vCPU.

use crate::host_cpus::HostCpus;

/// For each place, the index of the housekeeper that serves it: one that shares
/// the last-level cache, else one on the same node, else any; among equals the one
/// with the least to serve. A place without a CPU is near everything, a housekeeper
/// without one near nothing.
///
/// `housekeepers` are CPU numbers, one at least. Done once, so its cost, places ×
/// housekeepers, is paid before the guest runs.
pub fn assign(places: &[Option<u32>], housekeepers: &[Option<u32>], host: &HostCpus) -> Vec<usize> {
    let mut load = vec![0u32; housekeepers.len()];
    let keepers: Vec<_> = housekeepers.iter().map(|cpu| host.find((*cpu)?)).collect();
    places
        .iter()
        .map(|place| {
            let here = place.and_then(|cpu| host.find(cpu));
            let distance = |keeper: usize| match (here, keepers[keeper]) {
                (Some(here), Some(there)) if here.llc == there.llc => 0,
                (Some(here), Some(there)) if here.node == there.node => 1,
                (Some(_), _) => 2,
                (None, _) => 0,
            };
            let chosen = (0..housekeepers.len())
                .min_by_key(|keeper| (distance(*keeper), load[*keeper]))
                .unwrap_or(0);
            load[chosen] += 1;
            chosen
        })
        .collect()
}
