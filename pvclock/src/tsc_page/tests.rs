use super::*;

/// The guest's side, written from the specification's pseudo-code. `None` means
/// that it fell back to the MSR; so that a test ends, it also gives up after
/// `attempts` restarts.
fn guest_read(page: &[AtomicU64], attempts: usize) -> Option<DecodedPage> {
    let sequence = || page[SEQUENCE / 8].load(Ordering::Relaxed);
    for _ in 0..attempts {
        let start = sequence();
        fence(Ordering::Acquire);
        if start as u32 == 0 {
            return None;
        }
        let scale = page[SCALE / 8].load(Ordering::Relaxed);
        let offset = page[OFFSET / 8].load(Ordering::Relaxed) as i64;
        fence(Ordering::Acquire);
        if sequence() == start {
            let (sequence, reserved) = (start as u32, (start >> 32) as u32);
            return Some(DecodedPage { sequence, reserved, scale, offset });
        }
    }
    None
}

fn clock(tsc_hz: u64, start: u64) -> ReferenceClock {
    ReferenceClock::starting_at(tsc_hz, start).unwrap()
}

#[cfg(not(loom))]
mod concrete {
    use super::*;
    use proptest::prelude::*;
    use std::cell::RefCell;

    type Page = [AtomicU64; PAGE_SIZE / 8];

    fn page() -> Page {
        std::array::from_fn(|_| AtomicU64::new(0))
    }

    fn bytes(page: &Page) -> [u8; PAGE_SIZE] {
        let words: Vec<u8> =
            page.iter().flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes()).collect();
        words.try_into().unwrap()
    }

    #[test]
    fn a_published_page_has_the_specified_bytes() {
        let page = page();
        assert_eq!(publish(&page, &clock(3_000_000_000, 1 << 40), 0), 1);
        let bytes = bytes(&page);
        assert_eq!(bytes[0..8], [1, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(bytes[8..16], 61_489_146_912_365_172u64.to_le_bytes());
        assert_eq!(bytes[16..24], (-3_665_038_759i64).to_le_bytes()); // 2^40 / 300
        assert!(bytes[24..].iter().all(|&byte| byte == 0));
    }

    #[test]
    fn an_invalid_page_sends_the_guest_to_the_msr() {
        let page = page();
        assert_eq!(guest_read(&page, 1), None);
        publish(&page, &clock(3_000_000_000, 0), 7);
        assert_eq!(guest_read(&page, 1).unwrap().sequence, 8);
        invalidate(&page);
        assert_eq!(guest_read(&page, 1), None);
        assert_eq!(DecodedPage::from_bytes(&bytes(&page)).ticks(5), None);
    }

    #[test]
    fn sequences_skip_both_invalid_values() {
        for (previous, next) in
            [(0, 1), (1, 2), (0xFFFF_FFFD, 0xFFFF_FFFE), (0xFFFF_FFFE, 1), (u32::MAX, 1)]
        {
            assert_eq!(publish(&page(), &clock(3_000_000_000, 0), previous), next);
        }
    }

    /// Every store in order, so that a test can look at the page between any two.
    struct Recorder(RefCell<Vec<(usize, u64)>>);

    impl PageMemory for Recorder {
        fn store_u64(&self, offset: usize, value: u64) {
            self.0.borrow_mut().push((offset, value));
        }
    }

    #[test]
    fn scale_and_offset_change_only_while_invalid() {
        let recorder = Recorder(RefCell::default());
        let new = clock(2_000_000_000, 77);
        publish(&recorder, &new, 41);
        assert_eq!(
            recorder.0.into_inner(),
            [(SEQUENCE, 0), (SCALE, new.scale()), (OFFSET, new.offset() as u64), (SEQUENCE, 42)]
        );
    }

    proptest! {
        #[test]
        fn page_and_clock_agree_to_the_tick(
            tsc_hz in 10_000_001u64..10_000_000_000, start in 0u64..1 << 62, tsc in any::<u64>(),
        ) {
            let (page, clock) = (page(), clock(tsc_hz, start));
            publish(&page, &clock, 0);
            let decoded = DecodedPage::from_bytes(&bytes(&page));
            prop_assert_eq!(Some(decoded), guest_read(&page, 1));
            prop_assert_eq!(decoded.ticks(tsc), Some(clock.ticks(tsc)));
        }
    }
}

/// All interleavings (and all weak-memory outcomes) of one publication and one guest.
#[cfg(loom)]
mod loom_model {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    /// The three words that matter; loom tracks every atomic, so not a whole page.
    struct Head([AtomicU64; 3]);

    impl PageMemory for Head {
        fn store_u64(&self, offset: usize, value: u64) {
            self.0[offset / 8].store(value, Ordering::Relaxed);
        }
    }

    #[test]
    fn loom_a_guest_never_mixes_two_clocks() {
        loom::model(|| {
            let clocks = [clock(3_000_000_000, 0), clock(2_000_000_000, 1 << 40)];
            let head = Arc::new(Head(std::array::from_fn(|_| AtomicU64::new(0))));
            let first = publish(&*head, &clocks[0], 0);
            let writer = thread::spawn({
                let head = Arc::clone(&head);
                move || publish(&*head, &clocks[1], first)
            });
            if let Some(seen) = guest_read(&head.0, 2) {
                let expected = &clocks[(seen.sequence - first) as usize];
                assert_eq!((seen.scale, seen.offset), (expected.scale(), expected.offset()));
            }
            assert_eq!(writer.join().unwrap(), first + 1);
        });
    }
}
