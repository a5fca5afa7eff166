//! What the fuzz targets share: an access as a guest can make it.
#![forbid(unsafe_code)]

pub mod loader;

use arbitrary::Arbitrary;
use devices::bus::Device;

/// A read or a write of 1, 2, 4 or 8 bytes anywhere in a device's range.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub struct Access {
    write: bool,
    offset: u16,
    width: u8,
    value: u64,
}

impl Access {
    /// Makes the access as the bus would: whole inside a range of `len` bytes.
    pub fn make(self, device: &impl Device, len: u64) {
        let mut data = self.value.to_le_bytes();
        let data = &mut data[..1 << (self.width % 4)];
        let offset = u64::from(self.offset) % len;
        if offset + data.len() as u64 > len {
            return;
        }
        if self.write {
            device.write(offset, data);
        } else {
            device.read(offset, data);
        }
    }
}
