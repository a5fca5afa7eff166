//! What a clock read costs through the latch, a seqlock and a mutex: alone, and
//! while a writer updates the clock without pause on another CPU.
//!
//! The seqlock is the usual one, odd while written, with the same words in one cache
//! line and as much care for its normal case. The last lines compare the two readers
//! alone. They differ by tenths of a nanosecond, less than a busy machine adds to any
//! mean and than the place of a loop in the code may cost, so that comparison takes
//! the fastest of many short runs, and the mean of that over several places.

use std::hint::{black_box, spin_loop};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Barrier, Mutex};
use std::time::Instant;

use criterion::{Criterion, criterion_group, criterion_main};
use pvclock::latch::Latch;
use pvclock::reference::{ReferenceClock, Ticks100ns};

const TSC_HZ: u64 = 2_999_999_123;

/// A place for a clock that some threads read and one updates.
trait Shared: Sync {
    const NAME: &'static str;
    fn new(clock: ReferenceClock) -> Self;
    fn ticks(&self, tsc: u64) -> Ticks100ns;
    fn update(&self, clock: ReferenceClock);
}

impl Shared for Latch {
    const NAME: &'static str = "latch";
    fn new(clock: ReferenceClock) -> Self {
        Latch::new(clock)
    }
    #[inline]
    fn ticks(&self, tsc: u64) -> Ticks100ns {
        self.sample(move |clock| clock.ticks(tsc))
    }
    fn update(&self, clock: ReferenceClock) {
        Latch::update(self, |_| clock);
    }
}

impl Shared for Mutex<ReferenceClock> {
    const NAME: &'static str = "mutex";
    fn new(clock: ReferenceClock) -> Self {
        Mutex::new(clock)
    }
    #[inline]
    fn ticks(&self, tsc: u64) -> Ticks100ns {
        self.lock().expect("no holder panics").ticks(tsc)
    }
    fn update(&self, clock: ReferenceClock) {
        *self.lock().expect("no holder panics") = clock;
    }
}

#[repr(align(64))]
struct Seqlock {
    sequence: AtomicU64,
    scale: AtomicU64,
    offset: AtomicU64,
    tsc_hz: AtomicU64,
}

impl Shared for Seqlock {
    const NAME: &'static str = "seqlock";
    fn new(clock: ReferenceClock) -> Self {
        Self {
            sequence: AtomicU64::new(0),
            scale: AtomicU64::new(clock.scale()),
            offset: AtomicU64::new(clock.offset() as u64),
            tsc_hz: AtomicU64::new(clock.tsc_hz()),
        }
    }
    #[inline]
    fn ticks(&self, tsc: u64) -> Ticks100ns {
        match self.try_ticks(tsc) {
            Some(ticks) => ticks,
            None => self.wait_for_ticks(tsc),
        }
    }
    fn update(&self, clock: ReferenceClock) {
        let sequence = self.sequence.load(Ordering::Relaxed);
        self.sequence.store(sequence + 1, Ordering::Relaxed);
        fence(Ordering::Release);
        self.scale.store(clock.scale(), Ordering::Relaxed);
        self.offset.store(clock.offset() as u64, Ordering::Relaxed);
        self.tsc_hz.store(clock.tsc_hz(), Ordering::Relaxed);
        self.sequence.store(sequence + 2, Ordering::Release);
    }
}

impl Seqlock {
    #[inline]
    fn try_ticks(&self, tsc: u64) -> Option<Ticks100ns> {
        let sequence = self.sequence.load(Ordering::Acquire);
        if sequence & 1 == 1 {
            return None;
        }
        let scale = self.scale.load(Ordering::Relaxed);
        let offset = self.offset.load(Ordering::Relaxed);
        let _tsc_hz = self.tsc_hz.load(Ordering::Relaxed);
        let high = (u128::from(tsc) * u128::from(scale)) >> 64;
        let ticks = Ticks100ns((high as u64).wrapping_add(offset));
        fence(Ordering::Acquire);
        (self.sequence.load(Ordering::Relaxed) == sequence).then_some(ticks)
    }

    /// Out of line, as in the latch.
    #[cold]
    #[inline(never)]
    fn wait_for_ticks(&self, tsc: u64) -> Ticks100ns {
        loop {
            spin_loop();
            if let Some(ticks) = self.try_ticks(tsc) {
                return ticks;
            }
        }
    }
}

fn clock(n: u64) -> ReferenceClock {
    ReferenceClock::starting_at(TSC_HZ + (n & 1), n).expect("a supported frequency")
}

fn alone<S: Shared>(criterion: &mut Criterion) {
    let shared = S::new(clock(0));
    criterion.benchmark_group("alone").bench_function(S::NAME, |bencher| {
        bencher.iter(|| shared.ticks(black_box(1 << 40)));
    });
}

fn under_a_writer<S: Shared>(criterion: &mut Criterion) {
    let shared = S::new(clock(0));
    let (done, started) = (AtomicBool::new(false), Barrier::new(2));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let clocks = [clock(0), clock(1)];
            started.wait();
            while !done.load(Ordering::Relaxed) {
                clocks.iter().for_each(|&clock| shared.update(clock));
            }
        });
        started.wait();
        criterion.benchmark_group("under a writer").bench_function(S::NAME, |bencher| {
            bencher.iter(|| shared.ticks(black_box(1 << 40)));
        });
        done.store(true, Ordering::Relaxed);
    });
}

const READS: u64 = 2_000;

/// The fastest of many runs, in ns per read. `PLACE` moves the loop to another place
/// in the code.
#[inline(never)]
fn fastest<S: Shared, const PLACE: usize>(shared: &S) -> f64 {
    let run = |_| {
        (0..PLACE).for_each(|i| {
            black_box(i);
        });
        let start = Instant::now();
        black_box((0..READS).fold(0, |sum, tsc| sum ^ shared.ticks(tsc).0));
        start.elapsed()
    };
    let fastest = (0..2_000).map(run).min().unwrap_or_default();
    fastest.as_secs_f64() * 1e9 / READS as f64
}

fn mean_over_places<S: Shared>() -> f64 {
    let shared = black_box(S::new(clock(0)));
    let places = [
        fastest::<S, 0>(&shared),
        fastest::<S, 1>(&shared),
        fastest::<S, 2>(&shared),
        fastest::<S, 3>(&shared),
        fastest::<S, 4>(&shared),
        fastest::<S, 5>(&shared),
        fastest::<S, 6>(&shared),
        fastest::<S, 7>(&shared),
    ];
    println!("{} alone, fastest at each place: {places:.3?} ns", S::NAME);
    places.iter().sum::<f64>() / places.len() as f64
}

fn ratio(_: &mut Criterion) {
    let (latch, seqlock) = (mean_over_places::<Latch>(), mean_over_places::<Seqlock>());
    println!("latch {latch:.3} ns, seqlock {seqlock:.3} ns: {:.2} times as fast", seqlock / latch);
}

criterion_group!(
    benches,
    alone::<Latch>,
    alone::<Seqlock>,
    alone::<Mutex<ReferenceClock>>,
    under_a_writer::<Latch>,
    under_a_writer::<Seqlock>,
    under_a_writer::<Mutex<ReferenceClock>>,
    ratio
);
criterion_main!(benches);
