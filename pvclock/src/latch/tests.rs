use super::*;

/// Clock number `n`: all three words differ from those of any other.
fn clock(n: u64) -> ReferenceClock {
    ReferenceClock::from_words([n, n << 20, n << 40])
}

/// The number of a clock that is whole.
fn number(clock: &ReferenceClock) -> u64 {
    let [n, ..] = clock.to_words();
    assert_eq!(clock.to_words(), self::clock(n).to_words(), "halves of two clocks");
    n
}

#[cfg(not(loom))]
mod concrete {
    use super::*;
    use std::cell::Cell;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn a_reader_sees_the_latest_update() {
        let latch = Latch::new(clock(1));
        for n in 1..100 {
            assert_eq!(number(&latch.read()), n);
            assert_eq!(latch.update(|old| clock(number(&old) + 1)), clock(n + 1));
        }
    }

    #[test]
    fn a_sample_by_a_replaced_clock_is_taken_again() {
        let latch = Latch::new(clock(1));
        let calls = Cell::new(0);
        let seen = latch.sample(|clock| {
            calls.set(calls.get() + 1);
            if calls.get() == 1 {
                latch.update(|_| self::clock(2));
            }
            number(clock)
        });
        assert_eq!(seen, 2);
        assert!(calls.get() > 1);
    }

    #[test]
    fn a_reader_inside_an_update_does_not_wait() {
        // As a signal handler would on the writer's thread, between the lock and the
        // stores; loom covers the points between the stores.
        let latch = Latch::new(clock(1));
        latch.update(|old| {
            assert_eq!(latch.read(), old);
            clock(2)
        });
    }

    /// The states that an update passes through, each with a reader in it: what a
    /// signal handler sees that interrupts the writer between any two stores.
    #[test]
    fn every_half_written_state_reads_whole() {
        let (old, new) = (clock(1), clock(2));
        let latch = Latch::new(old);
        let Line { done, begun, banks } = &latch.line;
        let set = |word: &AtomicU64, value| word.store(value, Ordering::Relaxed);

        set(begun, 1);
        assert_eq!(latch.read(), old);
        for (word, value) in banks[0].iter().zip(new.to_words()) {
            set(word, value);
            assert_eq!(latch.read(), old);
        }
        set(done, 1);
        assert_eq!(latch.read(), new);
        for (word, value) in banks[1].iter().zip(new.to_words()) {
            set(word, value);
            assert_eq!(latch.read(), new);
        }
        // Just so does `update` leave it.
        let updated = Latch::new(old);
        updated.update(|_| new);
        assert_eq!(format!("{:?}", updated.line), format!("{:?}", latch.line));
    }

    #[test]
    fn readers_see_whole_clocks_in_order_while_a_writer_runs() {
        let latch = Latch::new(clock(0));
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let (mut last, mut changes) = (0, 0u64);
                    while !done.load(Ordering::Relaxed) || changes == 0 {
                        let seen = latch.sample(number_or_torn);
                        let seen = seen.expect("halves of two clocks");
                        assert!(seen >= last, "{seen} after {last}");
                        changes += u64::from(seen != last);
                        last = seen;
                    }
                });
            }
            for n in 1..=200_000 {
                latch.update(|_| clock(n));
            }
            done.store(true, Ordering::Relaxed);
        });
        assert_eq!(number(&latch.read()), 200_000);
    }

    /// As [`number`], but a torn clock is no failure inside a sample: only in what
    /// the sample returns.
    fn number_or_torn(clock: &ReferenceClock) -> Option<u64> {
        let [n, ..] = clock.to_words();
        (*clock == self::clock(n)).then_some(n)
    }
}

/// All interleavings and weak-memory outcomes, within the bounds that each test
/// states. The protocol is the same for any number of words; two can be torn apart and
/// keep the number of outcomes small.
///
/// One reader against an update is tried without bounds, and so are all readers: they
/// store nothing (`Line::sample` loads and fences), so what one does changes nothing for
/// the writer or for another reader, and each of two sees what it could see alone. That
/// both at once are right is tried within a bound all the same.
#[cfg(loom)]
mod loom_model {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    fn read(line: &Line<2>) -> u64 {
        let [low, high] = line.sample(|words| words);
        assert_eq!(low, high, "halves of two clocks");
        low
    }

    /// One writer and `readers` that read `reads` times each. From the second update
    /// on, bank 1 too has been rewritten under a reader.
    fn model(preemptions: Option<usize>, readers: usize, reads: usize, updates: u64) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = preemptions;
        builder.check(move || {
            let line = Arc::new(Line::new([0, 0]));
            let readers: Vec<_> = (0..readers)
                .map(|_| {
                    let line = Arc::clone(&line);
                    thread::spawn(move || {
                        let seen: Vec<u64> = (0..reads).map(|_| read(&line)).collect();
                        assert!(seen.is_sorted(), "{seen:?}");
                    })
                })
                .collect();
            (1..=updates).for_each(|n| line.store([n, n]));
            readers.into_iter().for_each(|reader| reader.join().unwrap());
            assert_eq!(read(&line), updates);
        });
    }

    #[test]
    fn loom_one_reader_across_one_update() {
        model(None, 1, 1, 1);
    }

    #[test]
    fn loom_one_reader_reads_in_order() {
        model(None, 1, 2, 1);
    }

    // More threads or updates have too many interleavings to visit each. These try
    // all with at most so many preemptions, beside the switches at a thread's end.

    #[test]
    fn loom_one_reader_across_two_updates() {
        model(Some(3), 1, 1, 2);
    }

    #[test]
    fn loom_two_readers_across_one_update() {
        model(Some(3), 2, 1, 1);
    }

    #[test]
    fn loom_two_writers_lose_no_update() {
        loom::model(|| {
            let latch = Arc::new(Latch::new(clock(1)));
            let writer = thread::spawn({
                let latch = Arc::clone(&latch);
                move || latch.update(|old| clock(number(&old) + 1))
            });
            latch.update(|old| clock(number(&old) + 1));
            writer.join().unwrap();
            assert_eq!(number(&latch.read()), 3);
        });
    }
}
