//! Any accesses, any time: no panic, ACPI mode stays on, and S5 is the only way off.
#![no_main]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use arbitrary::Arbitrary;
use devices::bus::Device;
use devices::pm::{LEN, PM1_CNT, Pm, S5_SLEEP_TYPE};
use devices::testing::FakeClock;
use fuzz::Access;
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
enum Step {
    Access(Access),
    Jump(u64),
}

fuzz_target!(|steps: Vec<Step>| {
    let clock = Arc::new(FakeClock::default());
    let offs = Arc::new(AtomicUsize::new(0));
    let counter = offs.clone();
    let poweroff = Box::new(move || {
        counter.fetch_add(1, Ordering::Relaxed);
    });
    let pm = Pm::new(clock.clone(), poweroff);
    for step in steps {
        let before = offs.load(Ordering::Relaxed);
        match step {
            Step::Access(access) => access.make(&pm, LEN),
            Step::Jump(to) => clock.set(to),
        }
        let mut control = [0; 2];
        pm.read(PM1_CNT, &mut control);
        assert_eq!(control[0] & 1, 1, "SCI_EN");
        let fired = offs.load(Ordering::Relaxed) - before;
        assert!(fired == 0 || fired == 1 && control[1] >> 2 & 7 == S5_SLEEP_TYPE);
        assert_eq!(Pm::from_state(pm.state(), clock.clone(), Box::new(|| ())).state(), pm.state());
    }
});
