//! From an address to the device behind it.
//!
//! Port I/O and MMIO have one [`Bus`] each. A bus is built once and never changes, so an access
//! takes no lock: a binary search over a handful of ranges.
//!
//! Threats: a guest chooses address, width and data. An access that no range claims whole reads
//! all ones and its writes are dropped, as on an undecoded bus.

use std::fmt;
use std::sync::Arc;

/// What sits behind a range of addresses. Called by several vCPU threads at once.
pub trait Device: Send + Sync {
    /// Answers a read of `data.len()` bytes at `offset` from the start of the range.
    ///
    /// The whole access lies inside the range; every byte of `data` must be written.
    fn read(&self, offset: u64, data: &mut [u8]);

    /// Takes a write of `data.len()` bytes at `offset` from the start of the range.
    fn write(&self, offset: u64, data: &[u8]);
}

/// Where a device answers.
#[derive(Clone)]
pub struct Range {
    /// What the range is called in statistics.
    pub name: &'static str,
    /// First address (a port or a guest-physical address).
    pub base: u64,
    /// Length in bytes; at least 1.
    pub len: u64,
    /// Who answers.
    pub device: Arc<dyn Device>,
}

impl Range {
    /// The last address of the range.
    fn last(&self) -> Option<u64> {
        self.len.checked_sub(1).and_then(|more| self.base.checked_add(more))
    }
}

/// Why a set of ranges makes no bus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Error {
    /// A range without a byte, or one that runs past the end of the address space.
    BadLength(&'static str),
    /// Two ranges claim the same address.
    Overlap(&'static str, &'static str),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::BadLength(name) => {
                write!(f, "device {name}: its address range is empty or wraps")
            }
            Error::Overlap(a, b) => write!(f, "devices {a} and {b} claim the same addresses"),
        }
    }
}

impl std::error::Error for Error {}

/// An immutable map from addresses to devices.
pub struct Bus {
    ranges: Box<[Range]>,
}

impl Bus {
    /// Builds the map.
    ///
    /// # Errors
    /// Empty, wrapping or overlapping ranges.
    pub fn new(mut ranges: Vec<Range>) -> Result<Self, Error> {
        ranges.sort_by_key(|range| range.base);
        for range in &ranges {
            range.last().ok_or(Error::BadLength(range.name))?;
        }
        for pair in ranges.windows(2) {
            if pair[0].last() >= Some(pair[1].base) {
                return Err(Error::Overlap(pair[0].name, pair[1].name));
            }
        }
        Ok(Self { ranges: ranges.into() })
    }

    /// The name of every range; a position in it is what [`Bus::read`] and [`Bus::write`] return.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &'static str> + '_ {
        self.ranges.iter().map(|range| range.name)
    }

    /// Reads `data.len()` bytes at `address`.
    ///
    /// Returns which range answered, or `None` (and all ones in `data`) where none did.
    pub fn read(&self, address: u64, data: &mut [u8]) -> Option<usize> {
        let Some((index, offset)) = self.find(address, data.len()) else {
            data.fill(0xFF);
            return None;
        };
        self.ranges[index].device.read(offset, data);
        Some(index)
    }

    /// Writes `data` at `address`.
    ///
    /// Returns which range took it, or `None` where none did.
    pub fn write(&self, address: u64, data: &[u8]) -> Option<usize> {
        let (index, offset) = self.find(address, data.len())?;
        self.ranges[index].device.write(offset, data);
        Some(index)
    }

    /// The range that holds all `len` bytes at `address`, and the offset into it.
    fn find(&self, address: u64, len: usize) -> Option<(usize, u64)> {
        let index = self.ranges.partition_point(|range| range.base <= address).checked_sub(1)?;
        let offset = address - self.ranges[index].base;
        let room = self.ranges[index].len.checked_sub(offset)?;
        (len as u64 <= room && len > 0).then_some((index, offset))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[derive(Default)]
    struct Probe(Mutex<Vec<(u64, Vec<u8>)>>);

    impl Device for Probe {
        fn read(&self, offset: u64, data: &mut [u8]) {
            data.fill(offset as u8);
        }

        fn write(&self, offset: u64, data: &[u8]) {
            self.0.lock().unwrap().push((offset, data.to_vec()));
        }
    }

    fn range(name: &'static str, base: u64, len: u64) -> Range {
        Range { name, base, len, device: Arc::new(Probe::default()) }
    }

    #[test]
    fn access_reaches_the_range_that_holds_it() {
        let bus = Bus::new(vec![range("b", 0x20, 4), range("a", 0x10, 8)]).unwrap();
        assert_eq!(bus.names().collect::<Vec<_>>(), ["a", "b"]);
        let mut data = [0; 2];
        assert_eq!(bus.read(0x16, &mut data), Some(0));
        assert_eq!(data, [6, 6]);
        assert_eq!(bus.read(0x20, &mut data), Some(1));
        assert_eq!(data, [0, 0]);
        assert_eq!(bus.write(0x22, &[1, 2]), Some(1));
    }

    #[test]
    fn unclaimed_reads_are_all_ones_and_writes_are_dropped() {
        let probe = Arc::new(Probe::default());
        let bus =
            Bus::new(vec![Range { name: "a", base: 0x10, len: 8, device: probe.clone() }]).unwrap();
        // Below, across the end, behind, and at the end of the address space.
        for address in [0, 0xF, 0x17, 0x18, 0x1000, u64::MAX] {
            let mut data = [0; 2];
            assert_eq!(bus.read(address, &mut data), None, "{address:#x}");
            assert_eq!(data, [0xFF; 2]);
            assert_eq!(bus.write(address, &[0; 2]), None);
        }
        assert!(probe.0.lock().unwrap().is_empty());
    }

    #[test]
    fn the_last_address_can_be_claimed() {
        let bus = Bus::new(vec![range("top", u64::MAX, 1)]).unwrap();
        assert_eq!(bus.read(u64::MAX, &mut [0]), Some(0));
    }

    #[test]
    fn bad_ranges_are_refused() {
        let refused = |ranges| Bus::new(ranges).err();
        assert_eq!(refused(vec![range("a", 5, 0)]), Some(Error::BadLength("a")));
        assert_eq!(refused(vec![range("a", u64::MAX, 2)]), Some(Error::BadLength("a")));
        let overlap = Some(Error::Overlap("a", "b"));
        assert_eq!(refused(vec![range("b", 7, 1), range("a", 0, 8)]), overlap);
        assert_eq!(refused(vec![range("a", 0, 8), range("b", 0, 1)]), overlap);
    }
}
