//! Threads that read the counter while another one halts, starts and writes it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::thread;
use std::time::Instant;

use devices::bus::Device;
use devices::clock::Clock;
use devices::hpet::Hpet;
use devices::testing::Recorder;

use crate::bench::{CONFIG, ENABLE};

struct HostClock(Instant);

impl Clock for HostClock {
    fn now_10ns(&self) -> u64 {
        fence(Ordering::SeqCst);
        let now = self.0.elapsed().as_nanos() as u64 / 10;
        fence(Ordering::SeqCst);
        now
    }
}

#[test]
fn no_reader_sees_the_counter_step_back_across_halts_and_starts() {
    let recorder = Arc::new(Recorder::default());
    let clock = Arc::new(HostClock(Instant::now()));
    let hpet = Hpet::new(3, clock, recorder.clone(), recorder);
    let latest = AtomicU64::new(0);
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    // Whatever any thread has seen before this read began is a lower bound.
                    let bound = latest.load(Ordering::SeqCst);
                    let value = hpet.counter();
                    assert!(value >= bound, "{value} after {bound}");
                    latest.fetch_max(value, Ordering::SeqCst);
                }
            });
        }
        for round in 0..20_000u64 {
            hpet.write(CONFIG, &((round + 1) % 2 * ENABLE).to_le_bytes());
            if round % 64 == 0 {
                thread::yield_now();
            }
        }
        done.store(true, Ordering::Relaxed);
    });
    assert!(latest.into_inner() > 0);
}
