//! Any accesses, any input: no panic, bounded memory, and no sender that waits for ever.
#![no_main]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use arbitrary::Arbitrary;
use devices::bus::Device;
use devices::serial::{LEN, Serial};
use fuzz::Access;
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
enum Step {
    Access(Access),
    Input(Vec<u8>),
}

fuzz_target!(|steps: Vec<Step>| {
    let calls = Arc::new(AtomicUsize::new(0));
    let counter = calls.clone();
    let room = Box::new(move || {
        counter.fetch_add(1, Ordering::Relaxed);
    });
    let serial = Serial::new(Box::new(std::io::sink()), Box::new(|| ()), room);
    let mut turned_away = 0;
    for step in steps {
        match step {
            Step::Access(access) => access.make(&serial, LEN),
            Step::Input(bytes) => {
                let taken = serial.enqueue(&bytes);
                assert!(taken <= bytes.len());
                turned_away += usize::from(taken < bytes.len());
            }
        }
        assert!(serial.state().in_buffer.len() <= 64);
        assert!(calls.load(Ordering::Relaxed) <= turned_away);
    }
    // Leave loopback and DLAB and read everything: whoever waits is called.
    let before = calls.load(Ordering::Relaxed);
    let waits = serial.enqueue(&[0; 65]) < 65;
    serial.write(3, &[3]);
    serial.write(4, &[0]);
    for _ in 0..64 {
        serial.read(0, &mut [0]);
    }
    assert!(waits && calls.load(Ordering::Relaxed) == before + 1);
    assert_eq!(serial.enqueue(b"more"), 4);
});
