//! Any accesses: no panic, and a reset only where one was asked for.
#![no_main]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use devices::i8042::{I8042, LEN};
use fuzz::Access;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|accesses: Vec<Access>| {
    let resets = Arc::new(AtomicUsize::new(0));
    let counter = resets.clone();
    let device = I8042::new(Box::new(move || {
        counter.fetch_add(1, Ordering::Relaxed);
    }));
    for access in accesses {
        let before = resets.load(Ordering::Relaxed);
        access.make(&device, LEN);
        // An access of 4 bytes can touch the command and the data port at most once each.
        assert!(resets.load(Ordering::Relaxed) - before <= 2);
        let copy = I8042::from_state(device.state(), Box::new(|| ()));
        assert_eq!(copy.state(), device.state());
    }
});
