//! A port on which a guest marks moments of its life.
//!
//! Each byte written is a mark; the VMM notes the time and its exit counts with
//! it, so that a measurement in the guest can be matched with what it cost here.
//!
//! Threats: the guest may mark without end (the VMM keeps a bounded number).

use crate::bus::Device;

/// Port of [`Marks`].
pub const PORT: u64 = 0x5F0;

/// A kernel's first instruction; stock kernels do not mark it.
pub const KERNEL_ENTRY: u8 = 0xf0;
/// The first instruction of /init.
pub const INIT: u8 = 0xf1;

/// What a byte stands for; those without a meaning are numbers for whoever
/// measures, who numbers from 0.
pub fn name(byte: u8) -> String {
    match byte {
        KERNEL_ENTRY => "kernel entry".into(),
        INIT => "/init".into(),
        number => number.to_string(),
    }
}

/// Reports every byte written.
pub struct Marks(Box<dyn Fn(u8) + Send + Sync>);

impl Marks {
    /// `mark` is called with each byte.
    pub fn new(mark: Box<dyn Fn(u8) + Send + Sync>) -> Self {
        Self(mark)
    }
}

impl Device for Marks {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&self, _offset: u64, data: &[u8]) {
        data.iter().for_each(|byte| (self.0)(*byte));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    #[test]
    fn bytes_have_names() {
        assert_eq!([name(0), name(INIT)], ["0", "/init"]);
    }

    #[test]
    fn each_byte_is_a_mark() {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let device = Marks::new(Box::new({
            let seen = seen.clone();
            move |byte| seen.lock().unwrap().push(byte)
        }));
        device.write(0, &[7]);
        device.write(0, &[1, 2]);
        assert_eq!(*seen.lock().unwrap(), [7, 1, 2]);
    }
}
