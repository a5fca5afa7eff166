//! Any accesses, any wall time: no panic, and in BCD mode every time register is a date's.
#![no_main]

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use arbitrary::Arbitrary;
use devices::bus::Device;
use devices::rtc::{LEN, Rtc};
use fuzz::Access;
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
enum Step {
    Access(Access),
    /// A write to one register, which takes two accesses.
    Register {
        register: u8,
        value: u8,
    },
    Jump(i64),
    Pass(i8),
}

fuzz_target!(|steps: Vec<Step>| {
    let wall = Arc::new(AtomicI64::new(0));
    let clock = wall.clone();
    let rtc = Rtc::new(Box::new(move || clock.load(Ordering::Relaxed)));
    let read = |register: u8| {
        rtc.write(0, &[register]);
        let mut byte = [0];
        rtc.read(1, &mut byte);
        byte[0]
    };
    for step in steps {
        match step {
            Step::Access(access) => access.make(&rtc, LEN),
            Step::Register { register, value } => rtc.write(0, &[register, value]),
            Step::Jump(to) => wall.store(to, Ordering::Relaxed),
            Step::Pass(seconds) => {
                wall.fetch_add(seconds.into(), Ordering::Relaxed);
            }
        }
    }
    // Leave SET and go to BCD and 24 hours.
    rtc.write(0, &[0x0B, 0x02]);
    assert_eq!(read(0x0A) & 0x80, 0, "no update in progress");
    for (register, low, high) in [
        (0x00, 0x00, 0x59),
        (0x02, 0x00, 0x59),
        (0x04, 0x00, 0x23),
        (0x06, 0x01, 0x07),
        (0x07, 0x01, 0x31),
        (0x08, 0x01, 0x12),
        (0x09, 0x00, 0x99),
        (0x32, 0x00, 0x99),
    ] {
        let value = read(register);
        assert!((low..=high).contains(&value) && value & 0xF < 10, "{register:#x}: {value:#x}");
    }
});
