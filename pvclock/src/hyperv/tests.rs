use super::*;
use crate::stimer;
use proptest::prelude::*;

const ALL: Features =
    Features { ref_counter: true, tsc_page: true, stimer: true, invariant_tsc: true };
const NONE: Features =
    Features { ref_counter: false, tsc_page: false, stimer: false, invariant_tsc: false };
const FREQUENCIES: Frequencies = Frequencies { tsc_hz: 2_999_999_123, apic_hz: 1_000_000_000 };
const RAM_END: u64 = 0x1000_0000;
const LINUX: u64 = 0x8100_0601_0000_0000;

/// A machine of one VP, with the three servers in the order that the VMM asks them.
struct Machine {
    partition: Partition,
    vp: VirtualProcessor,
    now: u64,
}

impl Machine {
    fn new(features: Features) -> Self {
        Self {
            partition: Partition::new(features, FREQUENCIES),
            vp: VirtualProcessor::new(features, 3),
            now: 1_000,
        }
    }

    fn read(&self, msr: u32) -> MsrRead {
        read_time_ref_count(&self.partition.features, msr, || Ticks100ns(self.now))
            .or_else(|| self.vp.read_msr(msr))
            .or_else(|| self.partition.read_msr(msr))
    }

    fn write(&mut self, msr: u32, value: u64) -> MsrWrite {
        self.vp
            .write_msr(msr, value, Ticks100ns(self.now))
            .or_else(|| self.partition.write_msr(msr, value, |gpa| gpa < RAM_END))
    }
}

fn moved(from: Option<u64>, to: Option<u64>) -> OverlayMove {
    OverlayMove { from, to }
}

fn leaf(features: &Features, function: u32) -> CpuidLeaf {
    let leaves = cpuid_leaves(features, 8);
    *leaves.iter().find(|leaf| leaf.function == function).unwrap()
}

#[test]
fn cpuid_has_what_linux_looks_for() {
    let leaves = cpuid_leaves(&ALL, 8);
    let functions: Vec<u32> = leaves.iter().map(|leaf| leaf.function).collect();
    assert_eq!(functions, (0x4000_0000..=leaves[0].eax).collect::<Vec<_>>());
    assert!(leaves[0].eax >= 0x4000_0005);
    let vendor: Vec<u8> = [leaves[0].ebx, leaves[0].ecx, leaves[0].edx]
        .iter()
        .flat_map(|r| r.to_le_bytes())
        .collect();
    assert_eq!(vendor, b"Microsoft Hv");
    assert_eq!(leaf(&ALL, 0x4000_0001).eax, 0x3123_7648);

    let expected = |eax, edx| CpuidLeaf { function: 0x4000_0003, eax, ebx: 0, ecx: 0, edx };
    assert_eq!(leaf(&ALL, 0x4000_0003), expected(0x8A6A, 1 << 8 | 1 << 19));
    assert_eq!(leaf(&NONE, 0x4000_0003), expected(0x0860, 1 << 8));
    let page = Features { ref_counter: true, tsc_page: true, ..NONE };
    assert_eq!(leaf(&page, 0x4000_0003), expected(0x0A62, 1 << 8));

    let advice = leaf(&ALL, 0x4000_0004);
    assert_eq!((advice.eax, advice.ebx), (0, 0xFFFF_FFFF));
    assert_eq!(leaf(&ALL, 0x4000_0005).eax, 8);
}

#[test]
fn every_msr_of_the_range_is_as_announced() {
    for features in [ALL, NONE] {
        let machine = Machine::new(features);
        for msr in msr::RANGE {
            let offered = match msr {
                0x4000_0000 | 0x4000_0001 | 0x4000_0002 | 0x4000_0022 | 0x4000_0023
                | 0x4000_0073 => true,
                0x4000_0020 => features.ref_counter,
                0x4000_0021 => features.tsc_page,
                0x4000_00B0..=0x4000_00B7 => features.stimer,
                0x4000_0118 => features.invariant_tsc,
                _ => false,
            };
            let read = machine.read(msr);
            assert_eq!(matches!(read, MsrRead::Handled(_)), offered, "{msr:#x}");
            assert_eq!(read == MsrRead::Fault, !offered, "{msr:#x}");
            if !offered {
                assert_eq!(Machine::new(features).write(msr, 0), MsrWrite::Fault, "{msr:#x}");
            }
        }
        for msr in [0, 0x10, 0x6E0, 0x3FFF_FFFF, 0x4000_0200, 0x4B56_4D00, u32::MAX] {
            assert_eq!(machine.read(msr), MsrRead::NotHandled);
            assert_eq!(Machine::new(features).write(msr, 1), MsrWrite::NotHandled);
        }
    }
}

#[test]
fn read_only_msrs_read_their_value_and_fault_on_writes() {
    let mut machine = Machine::new(ALL);
    for (msr, value) in [
        (msr::VP_INDEX, 3),
        (msr::TIME_REF_COUNT, 1_000),
        (msr::TSC_FREQUENCY, 2_999_999_123),
        (msr::APIC_FREQUENCY, 1_000_000_000),
    ] {
        assert_eq!(machine.write(msr, value), MsrWrite::Fault);
        assert_eq!(machine.read(msr), MsrRead::Handled(value));
    }
}

#[test]
fn the_tsc_page_moves_and_keeps_reserved_bits() {
    let mut machine = Machine::new(ALL);
    let reserved = 0xAAA;
    let mut expect = |value, effect: Option<OverlayMove>| {
        let effect = effect.map(Effect::ReferenceTscPage);
        assert_eq!(machine.write(msr::REFERENCE_TSC, value), MsrWrite::Handled(effect));
        assert_eq!(machine.read(msr::REFERENCE_TSC), MsrRead::Handled(value));
    };
    expect(0x5000 | reserved, None);
    expect(0x5000 | reserved | 1, Some(moved(None, Some(0x5000))));
    expect(0x5001, None);
    expect(0x7001, Some(moved(Some(0x5000), Some(0x7000))));
    expect(0x9000, Some(moved(Some(0x7000), None)));
    // Disabled, any address may be parked there.
    expect(!1, None);
    assert_eq!(machine.partition.reference_tsc_page(), None);
}

#[test]
fn an_overlay_outside_ram_faults_and_changes_nothing() {
    let mut machine = Machine::new(ALL);
    let _ = machine.write(msr::GUEST_OS_ID, LINUX);
    for msr in [msr::REFERENCE_TSC, msr::HYPERCALL] {
        let _ = machine.write(msr, 0x5001);
        for gpa in [RAM_END, !0xFFF] {
            assert_eq!(machine.write(msr, gpa | 1), MsrWrite::Fault);
            assert_eq!(machine.read(msr), MsrRead::Handled(0x5001));
        }
    }
}

#[test]
fn the_hypercall_page_needs_a_guest_os_id() {
    let mut machine = Machine::new(ALL);
    assert_eq!(machine.write(msr::HYPERCALL, 0x5001), MsrWrite::Handled(None));
    assert_eq!(machine.read(msr::HYPERCALL), MsrRead::Handled(0x5000));

    assert_eq!(machine.write(msr::GUEST_OS_ID, LINUX), MsrWrite::Handled(None));
    assert_eq!(
        machine.write(msr::HYPERCALL, 0x5001),
        MsrWrite::Handled(Some(Effect::HypercallPage(moved(None, Some(0x5000)))))
    );
    assert_eq!(machine.partition.hypercall_page(), Some(0x5000));

    assert_eq!(
        machine.write(msr::GUEST_OS_ID, 0),
        MsrWrite::Handled(Some(Effect::HypercallPage(moved(Some(0x5000), None))))
    );
    assert_eq!(machine.read(msr::HYPERCALL), MsrRead::Handled(0x5000));
}

#[test]
fn a_locked_hypercall_page_stays() {
    let mut machine = Machine::new(ALL);
    let _ = machine.write(msr::GUEST_OS_ID, LINUX);
    let _ = machine.write(msr::HYPERCALL, 0x5003);
    for value in [0, 0x7001, RAM_END | 1] {
        assert_eq!(machine.write(msr::HYPERCALL, value), MsrWrite::Handled(None));
        assert_eq!(machine.read(msr::HYPERCALL), MsrRead::Handled(0x5003));
    }
}

#[test]
fn the_invariant_tsc_switches_once() {
    let mut machine = Machine::new(ALL);
    let msr = msr::TSC_INVARIANT_CONTROL;
    assert_eq!(machine.write(msr, 1), MsrWrite::Handled(Some(Effect::InvariantTsc(true))));
    assert_eq!(machine.write(msr, 1), MsrWrite::Handled(None));
    assert_eq!(machine.write(msr, 2), MsrWrite::Fault);
    assert_eq!(machine.read(msr), MsrRead::Handled(1));
    assert_eq!(machine.write(msr, 0), MsrWrite::Handled(Some(Effect::InvariantTsc(false))));
}

#[test]
fn timers_are_reached_through_their_msrs() {
    let mut machine = Machine::new(ALL);
    let config = |vector: u64| stimer::AUTO_ENABLE | stimer::DIRECT | vector << 4;
    let timer_changed = MsrWrite::Handled(Some(Effect::Timer));
    for n in 0..TIMERS as u32 {
        let msr = msr::STIMER0_CONFIG + 2 * n;
        assert_eq!(machine.write(msr, config(0x40 + u64::from(n))), timer_changed);
        assert_eq!(machine.write(msr + 1, 5_000 - u64::from(n)), timer_changed);
        assert_eq!(machine.read(msr), MsrRead::Handled(config(0x40 + u64::from(n)) | 1));
        assert_eq!(machine.read(msr + 1), MsrRead::Handled(5_000 - u64::from(n)));
    }
    assert_eq!(machine.vp.next_due(), Some(Ticks100ns(4_997)));

    let mut fired = Vec::new();
    machine.vp.expire(Ticks100ns(4_998), |vector| fired.push(vector));
    assert_eq!(fired, [0x42, 0x43]);
    assert_eq!(machine.vp.next_due(), Some(Ticks100ns(4_999)));
    machine.vp.expire(Ticks100ns(9_000), |vector| fired.push(vector));
    assert_eq!(fired, [0x42, 0x43, 0x40, 0x41]);
    assert_eq!(machine.vp.next_due(), None);

    assert_eq!(machine.write(msr::STIMER0_CONFIG, 1 << 13), MsrWrite::Fault);
    assert_eq!(machine.read(msr::STIMER0_CONFIG), MsrRead::Handled(config(0x40)));
}

#[test]
fn vp_assist_is_storage() {
    let mut machine = Machine::new(NONE);
    assert_eq!(machine.write(msr::VP_ASSIST_PAGE, 0x6001), MsrWrite::Handled(None));
    assert_eq!(machine.read(msr::VP_ASSIST_PAGE), MsrRead::Handled(0x6001));
}

#[test]
fn the_hypercall_page_reads_as_meant_in_both_modes() {
    use iced_x86::{Decoder, DecoderOptions};
    let listing = |bitness| -> Vec<String> {
        Decoder::new(bitness, &HYPERCALL_PAGE, DecoderOptions::NONE)
            .into_iter()
            .map(|instruction| instruction.to_string())
            .collect()
    };
    assert_eq!(
        listing(64),
        ["xor eax,eax", "xchg rax,rax", "je short 8", "xor edx,edx", "mov eax,2", "ret"]
    );
    assert_eq!(
        listing(32),
        ["xor eax,eax", "dec eax", "nop", "je short 8", "xor edx,edx", "mov eax,2", "ret"]
    );
}

proptest! {
    /// Whatever is written: overlays lie in RAM and are page-aligned, effects tell
    /// true moves, faults change nothing.
    #[test]
    fn effects_track_the_state(
        writes in prop::collection::vec(
            (prop_oneof![
                Just(msr::GUEST_OS_ID), Just(msr::HYPERCALL), Just(msr::REFERENCE_TSC),
                Just(msr::TSC_INVARIANT_CONTROL), msr::RANGE,
            ], prop_oneof![any::<u64>(), 0..2 * RAM_END, 0u64..4]), 1..100),
    ) {
        let mut machine = Machine::new(ALL);
        let (mut hypercall, mut tsc_page) = (None, None);
        for (msr, value) in writes {
            let before = machine.partition.clone();
            match machine.write(msr, value) {
                MsrWrite::Handled(Some(Effect::HypercallPage(OverlayMove { from, to }))) => {
                    prop_assert_eq!(from, hypercall);
                    prop_assert_ne!(from, to);
                    hypercall = to;
                }
                MsrWrite::Handled(Some(Effect::ReferenceTscPage(OverlayMove { from, to }))) => {
                    prop_assert_eq!(from, tsc_page);
                    prop_assert_ne!(from, to);
                    tsc_page = to;
                }
                MsrWrite::Fault => prop_assert_eq!(&before, &machine.partition),
                _ => {}
            }
            prop_assert_eq!(hypercall, machine.partition.hypercall_page());
            prop_assert_eq!(tsc_page, machine.partition.reference_tsc_page());
            for gpa in [hypercall, tsc_page].into_iter().flatten() {
                prop_assert!(gpa < RAM_END && gpa % 4096 == 0);
            }
        }
    }
}
