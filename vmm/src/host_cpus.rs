//! The host's CPUs: which there are, which are set apart, and which are near.

use crate::error::{Error, Result};
use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;
use std::str::FromStr;

/// Highest CPU number that a list may name: beyond any kernel's NR_CPUS, and small
/// enough that `0-4294967295` costs no memory.
const MOST: u32 = 1 << 16;

/// A set of CPUs as the kernel writes it: `0-3,8`. In the order given.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CpuList(pub Vec<u32>);

impl FromStr for CpuList {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let wrong = || "write CPU numbers and ranges, as in 0-3,8".to_string();
        let number = |text: &str| {
            let n: u32 = text.trim().parse().map_err(|_| wrong())?;
            if n < MOST { Ok(n) } else { Err(format!("no host has a CPU {n}")) }
        };
        let (mut cpus, mut seen) = (Vec::new(), BTreeSet::new());
        for part in text.trim().split(',') {
            let (first, last) = match part.split_once('-') {
                Some((first, last)) => (number(first)?, number(last)?),
                None => (number(part)?, number(part)?),
            };
            if first > last {
                return Err(wrong());
            }
            for cpu in first..=last {
                if !seen.insert(cpu) {
                    return Err(format!("CPU {cpu} is named twice"));
                }
                cpus.push(cpu);
            }
        }
        Ok(Self(cpus))
    }
}

impl fmt::Display for CpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        for run in self.0.chunk_by(|a, b| a + 1 == *b) {
            match run {
                [only] => write!(f, "{separator}{only}")?,
                [first, .., last] => write!(f, "{separator}{first}-{last}")?,
                [] => {}
            }
            separator = ",";
        }
        Ok(())
    }
}

/// One CPU, and what it shares with others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostCpu {
    /// Its number.
    pub number: u32,
    /// Equal for CPUs that share the last-level cache.
    pub llc: u32,
    /// NUMA node.
    pub node: u32,
}

/// The CPUs that are online.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostCpus {
    /// In order of their numbers.
    pub cpus: Vec<HostCpu>,
    /// Those that the kernel keeps free of others' work or of its tick.
    pub set_apart: BTreeSet<u32>,
}

impl HostCpus {
    /// Reads `/sys/devices/system`.
    ///
    /// # Errors
    /// No list of online CPUs: /sys is not mounted.
    pub fn read() -> Result<Self> {
        Self::read_from(Path::new("/sys/devices/system"))
    }

    fn read_from(system: &Path) -> Result<Self> {
        let text = |path: &str| std::fs::read_to_string(system.join(path)).unwrap_or_default();
        // Absent or empty where the kernel knows no such CPUs, or this one ("(null)").
        let list = |path: &str| text(path).parse::<CpuList>().unwrap_or_default().0;
        let online = list("cpu/online");
        if online.is_empty() {
            let path = system.join("cpu/online");
            return Err(Error::new(format!("{}: no list of CPUs; mount /sys", path.display())));
        }
        let mut node_of = std::collections::BTreeMap::new();
        for node in list("node/online") {
            for cpu in list(&format!("node/node{node}/cpulist")) {
                node_of.insert(cpu, node);
            }
        }
        let cpus = online
            .into_iter()
            .map(|number| {
                let caches = format!("cpu/cpu{number}/cache");
                let last = (0..8).rev().map(|i| format!("{caches}/index{i}/shared_cpu_list"));
                let shared = last.map(|path| list(&path)).find(|cpus| !cpus.is_empty());
                // A cache is known by the lowest of its CPUs; without one, by its own.
                let llc = shared.and_then(|cpus| cpus.into_iter().min()).unwrap_or(number);
                HostCpu { number, llc, node: node_of.get(&number).copied().unwrap_or(0) }
            })
            .collect();
        let set_apart = ["cpu/isolated", "cpu/nohz_full"].into_iter().flat_map(list).collect();
        Ok(Self { cpus, set_apart })
    }

    /// The CPU with this number, if it is online.
    pub fn find(&self, number: u32) -> Option<&HostCpu> {
        self.cpus.binary_search_by_key(&number, |cpu| cpu.number).ok().map(|at| &self.cpus[at])
    }

    /// All numbers.
    pub fn list(&self) -> CpuList {
        CpuList(self.cpus.iter().map(|cpu| cpu.number).collect())
    }

    /// Refuses a CPU that is not there; `flag` names it.
    ///
    /// # Errors
    /// One line with the CPUs that there are.
    pub fn expect(&self, flag: &str, number: u32) -> Result<&HostCpu> {
        self.find(number).ok_or_else(|| {
            let online = self.list();
            Error::new(format!("{flag}: CPU {number} is not online here; there are {online}"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn lists_are_read_as_the_kernel_writes_them() {
        let list = |text: &str| text.parse::<CpuList>().map(|l| l.0);
        assert_eq!(list("0-3,8\n"), Ok(vec![0, 1, 2, 3, 8]));
        assert_eq!(list("5"), Ok(vec![5]));
        assert_eq!(list("3,1"), Ok(vec![3, 1]));
        for bad in ["", "a", "3-1", "1,", "1-", "-1", "1,1", "0-4294967295", "99999999999"] {
            assert!(list(bad).is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn a_list_survives_being_written(cpus in proptest::collection::btree_set(0..2000u32, 1..50)) {
            let list = CpuList(cpus.into_iter().collect());
            prop_assert_eq!(list.to_string().parse::<CpuList>(), Ok(list));
        }
    }

    #[test]
    fn a_topology_is_read_from_files() {
        let directory = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = directory.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("cpu/online", "0-2,5\n");
        write("cpu/isolated", "2\n");
        write("cpu/nohz_full", "  (null)\n");
        write("node/online", "0-1\n");
        write("node/node0/cpulist", "0-1\n");
        write("node/node1/cpulist", "2-5\n");
        write("cpu/cpu1/cache/index3/shared_cpu_list", "0-1\n");
        write("cpu/cpu1/cache/index0/shared_cpu_list", "1\n");
        let host = HostCpus::read_from(directory.path()).unwrap();
        assert_eq!(host.list().to_string(), "0-2,5");
        assert_eq!(host.find(1), Some(&HostCpu { number: 1, llc: 0, node: 0 }));
        assert_eq!(host.find(5), Some(&HostCpu { number: 5, llc: 5, node: 1 }));
        assert_eq!(host.find(3), None);
        assert_eq!(host.set_apart, BTreeSet::from([2]));
        let refusal = host.expect("--pin", 9999).unwrap_err().to_string();
        assert!(refusal.contains("--pin: CPU 9999") && refusal.contains("0-2,5"), "{refusal}");
        assert!(HostCpus::read_from(Path::new("/nonexistent")).is_err());
    }
}
