//! Any accesses, any time: each costs a bounded amount of work, and a deadline that the device
//! asks for always has an interrupt to deliver.
#![no_main]

use std::sync::Arc;

use arbitrary::Arbitrary;
use devices::bus::Device;
use devices::hpet::{Hpet, LEN};
use devices::testing::{FakeClock, Recorder};
use fuzz::Access;
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
enum Step {
    Access(Access),
    /// A write to one of the registers that matter, which a random offset seldom hits.
    Register {
        timer: u8,
        register: u8,
        half: u8,
        value: u64,
    },
    Move(i32),
    Jump(u64),
    Wake,
    Expire,
    Restore,
}

/// Interrupts of one access: with 32 timers, twice a message or a pulse each (before and after a
/// change), and every line twice.
const MOST_OUTPUTS: usize = 2 * (32 + 32) + 2;

fuzz_target!(|input: (u8, Vec<Step>)| {
    let (timers, steps) = input;
    let clock = Arc::new(FakeClock::default());
    let recorder = Arc::new(Recorder::default());
    let hpet = Hpet::new(timers.into(), clock.clone(), recorder.clone(), recorder.clone());
    for step in steps {
        let (looks, asked) = (clock.reads(), recorder.deadline_calls());
        match step {
            Step::Access(access) => access.make(&hpet, LEN),
            Step::Register { timer, register, half, value } => {
                let general = [0x10, 0x20, 0xF0];
                let timer = 0x100 + 0x20 * u64::from(timer % 32);
                let offset = match register % 8 {
                    register @ 0..3 => general[usize::from(register)],
                    register => timer + 8 * (u64::from(register) % 3),
                };
                let data = value.to_le_bytes();
                match half % 3 {
                    0 => hpet.write(offset, &data),
                    1 => hpet.write(offset, &data[..4]),
                    _ => hpet.write(offset + 4, &data[4..]),
                }
            }
            Step::Move(by) => clock.advance(by.into()),
            Step::Jump(to) => clock.set(to),
            Step::Wake => {
                if let Some(deadline) = recorder.deadline() {
                    clock.set(clock.get().max(deadline));
                    hpet.expire();
                    let delivered = recorder.take();
                    assert!(!delivered.is_empty(), "armed, but had nothing to deliver");
                    assert!(delivered.len() <= MOST_OUTPUTS);
                }
            }
            Step::Expire => hpet.expire(),
            Step::Restore => {
                let state = hpet.state();
                let fresh = Arc::new(Recorder::default());
                let copy =
                    Hpet::from_state(state.clone(), clock.clone(), fresh.clone(), fresh.clone());
                assert_eq!(copy.state(), state);
                assert_eq!(fresh.lines(), recorder.lines());
            }
        }
        assert!(clock.reads() - looks <= 5, "too many looks at the clock");
        assert!(recorder.deadline_calls() - asked <= 2);
        assert!(recorder.take().len() <= MOST_OUTPUTS);
    }
});
