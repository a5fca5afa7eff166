//! The Hyper-V MSRs of one vCPU: any access with any value at any time. No panic;
//! overlays lie in RAM only, and move from where they were; a fault changes nothing;
//! a timer fires once, with a vector that it was given.
#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use pvclock::hyperv::{
    Effect, Features, Frequencies, MsrRead, MsrWrite, Partition, TIMERS, VirtualProcessor, msr,
    read_time_ref_count,
};
use pvclock::reference::Ticks100ns;

/// RAM, of which overlays may cover whole pages.
const RAM_END: u64 = 1 << 30;

#[derive(Arbitrary, Debug)]
enum Step {
    /// An MSR of the range, by its place in it.
    Read(u16),
    Write(u16, u64),
    /// Any MSR at all.
    ReadAny(u32),
    WriteAny(u32, u64),
    /// Time goes to here, backwards too.
    Time(u64),
    Expire,
}

struct Bench {
    features: Features,
    partition: Partition,
    processor: VirtualProcessor,
    now: Ticks100ns,
}

impl Bench {
    fn read(&self, number: u32) -> MsrRead {
        read_time_ref_count(&self.features, number, || self.now)
            .or_else(|| self.processor.read_msr(number))
            .or_else(|| self.partition.read_msr(number))
    }

    fn write(&mut self, number: u32, value: u64) {
        let pages = |p: &Partition| [p.hypercall_page(), p.reference_tsc_page()];
        let before = (pages(&self.partition), self.read(number));
        let is_ram = |gpa: u64| gpa < RAM_END;
        let written = self
            .processor
            .write_msr(number, value, self.now)
            .or_else(|| self.partition.write_msr(number, value, is_ram));
        let after = pages(&self.partition);
        assert!(after.iter().flatten().all(|gpa| is_ram(*gpa) && gpa & 0xfff == 0));
        match written {
            MsrWrite::Handled(Some(Effect::HypercallPage(moved))) => {
                assert_eq!((moved.from, moved.to), (before.0[0], after[0]));
            }
            MsrWrite::Handled(Some(Effect::ReferenceTscPage(moved))) => {
                assert_eq!((moved.from, moved.to), (before.0[1], after[1]));
            }
            MsrWrite::Handled(_) => assert_eq!(before.0, after),
            MsrWrite::Fault => assert_eq!(before, (after, self.read(number))),
            MsrWrite::NotHandled => assert!(!msr::RANGE.contains(&number)),
        }
    }
}

fuzz_target!(|input: (u8, Vec<Step>)| {
    let (bits, steps) = input;
    let features = Features {
        ref_counter: bits & 1 != 0,
        tsc_page: bits & 2 != 0,
        stimer: bits & 4 != 0,
        invariant_tsc: bits & 8 != 0,
    };
    let frequencies = Frequencies { tsc_hz: 2_500_000_000, apic_hz: 1_000_000_000 };
    let mut bench = Bench {
        features,
        partition: Partition::new(features, frequencies),
        processor: VirtualProcessor::new(features, 0),
        now: Ticks100ns(0),
    };
    let in_range = |place: u16| msr::RANGE.start() + u32::from(place) % 0x200;
    for step in steps {
        match step {
            Step::Read(place) => assert_ne!(bench.read(in_range(place)), MsrRead::NotHandled),
            Step::Write(place, value) => bench.write(in_range(place), value),
            Step::ReadAny(number) => drop(bench.read(number)),
            Step::WriteAny(number, value) => bench.write(number, value),
            Step::Time(to) => bench.now = Ticks100ns(to),
            Step::Expire => {
                let due = bench.processor.next_due();
                let mut fired = 0;
                bench.processor.expire(bench.now, |_| fired += 1);
                assert!(fired <= TIMERS);
                // Nothing fires early.
                assert!(fired == 0 || due.is_some_and(|due| due <= bench.now));
            }
        }
    }
});
