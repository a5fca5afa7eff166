//! The pvpanic port: a guest kernel that panics says so.
//!
//! Threats: the guest may report as often as it likes; the receiver decides what a report costs.

use crate::bus::Device;

/// The port.
pub const PORT: u64 = 0x505;

/// What the guest reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The guest kernel panicked and is going nowhere.
    Panicked,
    /// The guest kernel panicked and boots its crash kernel.
    CrashLoaded,
}

const PANICKED: u8 = 1 << 0;
const CRASH_LOADED: u8 = 1 << 1;

/// The device.
pub struct Pvpanic(Box<dyn Fn(Event) + Send + Sync>);

impl Pvpanic {
    /// `report` is called with each event.
    pub fn new(report: Box<dyn Fn(Event) + Send + Sync>) -> Self {
        Self(report)
    }
}

impl Device for Pvpanic {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(PANICKED | CRASH_LOADED);
    }

    fn write(&self, _offset: u64, data: &[u8]) {
        let Some(&events) = data.first() else { return };
        if events & PANICKED != 0 {
            (self.0)(Event::Panicked);
        }
        if events & CRASH_LOADED != 0 {
            (self.0)(Event::CrashLoaded);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[test]
    fn reports_what_it_says_it_supports() {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let log = seen.clone();
        let device = Pvpanic::new(Box::new(move |event| log.lock().unwrap().push(event)));
        let mut supported = [0];
        device.read(0, &mut supported);
        assert_eq!(supported, [3]);
        for (written, expected) in
            [(0, vec![]), (1, vec![Event::Panicked]), (2, vec![Event::CrashLoaded]), (0xFC, vec![])]
        {
            device.write(0, &[written]);
            assert_eq!(std::mem::take(&mut *seen.lock().unwrap()), expected);
        }
    }
}
