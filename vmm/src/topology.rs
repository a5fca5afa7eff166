//! Sockets, cores and threads, and the APIC ids that tell of them.

use crate::error::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// A regular topology: every socket has the same cores, every core the same threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Topology {
    /// Physical packages.
    pub sockets: u32,
    /// Cores in a package.
    pub cores: u32,
    /// Threads in a core.
    pub threads: u32,
}

impl Topology {
    /// One socket whose cores have one thread each.
    pub fn one_socket(cpus: u32) -> Self {
        Self { sockets: 1, cores: cpus, threads: 1 }
    }

    /// Number of vCPUs.
    pub fn cpus(&self) -> u64 {
        u64::from(self.sockets) * u64::from(self.cores) * u64::from(self.threads)
    }

    /// Bits of the APIC id that tell threads of a core apart (leaf 0xB, level 0).
    pub fn thread_bits(&self) -> u32 {
        width(self.threads)
    }

    /// Bits of the APIC id below the socket number (leaf 0xB, level 1).
    pub fn package_bits(&self) -> u32 {
        width(self.threads) + width(self.cores)
    }

    /// x2APIC id of the vCPU with this index: socket, core and thread number
    /// side by side, each in a field of whole bits (Intel SDM 3A §9.9).
    pub fn apic_id(&self, index: u32) -> u32 {
        let thread = index % self.threads;
        let core = index / self.threads % self.cores;
        let socket = index / self.threads / self.cores;
        socket << self.package_bits() | core << self.thread_bits() | thread
    }
}

impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sockets={},cores={},threads={}", self.sockets, self.cores, self.threads)
    }
}

/// Bits needed to number `count` things.
fn width(count: u32) -> u32 {
    count.max(1).next_power_of_two().trailing_zeros()
}

impl FromStr for Topology {
    type Err = Error;

    /// Reads `sockets=S,cores=C,threads=T`; what is not named is 1.
    fn from_str(text: &str) -> Result<Self> {
        let wrong = || Error::new("write sockets=S,cores=C,threads=T, each from 1 to 1024");
        let mut topology = Topology { sockets: 1, cores: 1, threads: 1 };
        for part in text.split(',') {
            let (name, value) = part.split_once('=').ok_or_else(wrong)?;
            let value = value.parse().ok().filter(|n| (1..=1024).contains(n)).ok_or_else(wrong)?;
            match name {
                "sockets" => topology.sockets = value,
                "cores" => topology.cores = value,
                "threads" => topology.threads = value,
                _ => return Err(wrong()),
            }
        }
        Ok(topology)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn apic_ids_are_unique_and_nested() {
        for (sockets, cores, threads) in [(1, 40, 1), (2, 14, 2), (3, 5, 2), (1, 1024, 1)] {
            let t = Topology { sockets, cores, threads };
            let ids: Vec<u32> = (0..t.cpus() as u32).map(|i| t.apic_id(i)).collect();
            assert_eq!(ids.iter().collect::<HashSet<_>>().len() as u64, t.cpus());
            for (i, id) in (0..).zip(&ids) {
                assert_eq!(id >> t.package_bits(), i / (cores * threads));
            }
        }
        assert_eq!(Topology::one_socket(255).apic_id(254), 254);
    }

    #[test]
    fn the_flag_is_read_or_refused() {
        let t: Topology = "sockets=2,cores=14,threads=2".parse().unwrap();
        assert_eq!(t.cpus(), 56);
        for bad in ["", "cores", "cores=0", "cores=x", "dies=2", "cores=99999999999"] {
            assert!(bad.parse::<Topology>().is_err(), "{bad}");
        }
    }
}
