//! Random arming, re-arming and cancelling against the threads that fire, with no
//! guest and no KVM: no timer fires early, twice, after its cancellation or never.
//!
//! `STRESS_OPERATIONS=10000000 cargo test --release -p vmm --test timer_stress -- --nocapture`
//! is the full length; without the variable it is a fiftieth of that.

use devices::clock::Clock;
use pvclock::hyperv::{Features, MsrRead, MsrWrite, msr};
use pvclock::stimer::{AUTO_ENABLE, DIRECT, ENABLE, VECTOR_SHIFT};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};
use vmm::host_cpus::HostCpus;
use vmm::housekeeping::{Manner, Plan, Timers};
use vmm::hyperv::Processor;
use vmm::lapic_timer::{LapicTimer, LocalVector};
use vmm::timeline::Timeline;
use vmm::timer_line::TimerLine;
use vmm::{pinning, probe};

/// Vectors that one timer cycles through: each arming has its own, so that an
/// interrupt tells which arming it belongs to.
const GENERATIONS: usize = 56;
const FIRST_VECTOR: usize = 16;

/// What became of each arming, by vector.
struct Record {
    timeline: Arc<Timeline>,
    /// The earliest time it may fire: 100 ns for synthetic timers, TSC for the APIC's.
    deadline: Vec<AtomicU64>,
    fired: Vec<AtomicU64>,
    early: AtomicU64,
    by_tsc: bool,
}

impl Record {
    fn new(timeline: &Arc<Timeline>, by_tsc: bool) -> Arc<Self> {
        let zeros = || (0..256).map(|_| AtomicU64::new(0)).collect();
        Arc::new(Self {
            timeline: timeline.clone(),
            deadline: zeros(),
            fired: zeros(),
            early: AtomicU64::new(0),
            by_tsc,
        })
    }

    fn now(&self) -> u64 {
        if self.by_tsc { self.timeline.guest_tsc() } else { self.timeline.now().0 }
    }

    fn raise(&self, vector: u8) {
        let vector = usize::from(vector);
        self.fired[vector].fetch_add(1, SeqCst);
        if self.now() < self.deadline[vector].load(SeqCst) {
            self.early.fetch_add(1, SeqCst);
        }
    }
}

/// One timer under test: armed with a deadline and a vector, asked whether it is armed.
trait Target {
    fn arm(&self, timer: usize, deadline: u64, vector: usize);
    fn disarm(&self, timer: usize);
    fn is_armed(&self, timer: usize) -> bool;
}

impl Target for Processor {
    fn arm(&self, timer: usize, deadline: u64, vector: usize) {
        let config = DIRECT | AUTO_ENABLE | (vector as u64) << VECTOR_SHIFT;
        let at = 2 * timer as u32;
        for (register, value) in [(msr::STIMER0_CONFIG, config), (msr::STIMER0_COUNT, deadline)] {
            assert!(matches!(self.write_msr(register + at, value), MsrWrite::Handled(_)));
        }
    }

    fn disarm(&self, timer: usize) {
        let count = msr::STIMER0_COUNT + 2 * timer as u32;
        assert!(matches!(self.write_msr(count, 0), MsrWrite::Handled(_)));
    }

    fn is_armed(&self, timer: usize) -> bool {
        match self.read_msr(msr::STIMER0_CONFIG + 2 * timer as u32) {
            MsrRead::Handled(config) => config & ENABLE != 0,
            other => panic!("{other:?}"),
        }
    }
}

const DEADLINE_MODE: u32 = 2 << 17;

impl Target for LapicTimer {
    fn arm(&self, _: usize, deadline: u64, vector: usize) {
        self.write(deadline, LocalVector(DEADLINE_MODE | vector as u32));
    }

    fn disarm(&self, _: usize) {
        self.write(0, LocalVector(DEADLINE_MODE));
    }

    fn is_armed(&self, _: usize) -> bool {
        self.read(LocalVector(DEADLINE_MODE)) != 0
    }
}

/// xorshift64*: the sequence is the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) % n
    }
}

#[derive(Debug, Default)]
struct Counts {
    operations: u64,
    armed: u64,
    fired: u64,
    cancelled: u64,
}

const PATIENCE: Duration = Duration::from_secs(30);

/// Works on `timers` timers of one vCPU. `unit` is what 100 ns are in deadlines.
fn operate(
    target: &dyn Target,
    record: &Record,
    timers: usize,
    unit: u64,
    operations: u64,
) -> Counts {
    let mut random = Random(0x9e37_79b9_7f4a_7c15 + unit);
    let mut counts = Counts::default();
    let mut generation = vec![0usize; timers];
    // Fires seen of each arming when it was replaced; `None` for one still armed.
    let mut settled = vec![None; 256];
    let vector = |timer: usize, generation: usize| {
        FIRST_VECTOR + timer * GENERATIONS + generation % GENERATIONS
    };
    for operation in 0..operations {
        counts.operations += 1;
        let timer = random.below(timers as u64) as usize;
        let old = vector(timer, generation[timer]);
        // Fired and disarmed are one change: whoever sees it disarmed sees the fire.
        if settled[old].is_none() && generation[timer] > 0 && !target.is_armed(timer) {
            assert_eq!(record.fired[old].load(SeqCst), 1, "disarmed without a fire");
        }
        match random.below(8) {
            0 => target.disarm(timer),
            // Waits for the fire: one that never comes is found here.
            1 if operation % 64 == 1 && settled[old].is_none() && generation[timer] > 0 => {
                let start = Instant::now();
                while record.fired[old].load(SeqCst) == 0 {
                    assert!(start.elapsed() < PATIENCE, "timer {timer} never fired");
                    std::thread::yield_now();
                }
                continue;
            }
            _ => {
                generation[timer] += 1;
                let new = vector(timer, generation[timer]);
                if generation[timer] > GENERATIONS {
                    let expected = settled[new].expect("replaced long ago");
                    let fired = record.fired[new].load(SeqCst);
                    assert_eq!(fired, expected, "fired after it was cancelled");
                }
                // Long before now, up to 0.8 ms ahead; most are replaced before they fire.
                let ahead = (1u64 << random.below(14)).wrapping_sub(random.below(32)) as i64;
                let deadline =
                    record.now().saturating_add_signed(ahead.saturating_mul(unit as i64));
                let deadline = deadline.max(1);
                record.fired[new].store(0, SeqCst);
                record.deadline[new].store(deadline, SeqCst);
                settled[new] = None;
                target.arm(timer, deadline, new);
                counts.armed += 1;
            }
        }
        // The old arming is over: either it has fired or it never will.
        let current = vector(timer, generation[timer]);
        if (old != current || !target.is_armed(timer))
            && generation[timer] > 0
            && settled[old].is_none()
        {
            let fired = record.fired[old].load(SeqCst);
            assert!(fired <= 1, "one arming fired {fired} times");
            settled[old] = Some(fired);
            counts.fired += fired;
            counts.cancelled += 1 - fired;
        }
    }
    for timer in 0..timers {
        let start = Instant::now();
        while target.is_armed(timer) {
            assert!(start.elapsed() < PATIENCE, "a fire was lost at the end");
            std::thread::yield_now();
        }
    }
    assert_eq!(record.early.load(SeqCst), 0, "early fires");
    counts
}

#[test]
fn nothing_is_early_lost_or_twice() {
    const FULL: u64 = 10_000_000;
    let wanted = std::env::var("STRESS_OPERATIONS").ok();
    let operations = wanted.map_or(FULL / 50, |n| n.parse().expect("STRESS_OPERATIONS: a number"));
    let tsc_hz = probe::tsc("").hz as u64;
    let timeline = Arc::new(Timeline::start(tsc_hz, 0).expect("a usable TSC"));
    let host = HostCpus::read().expect("/sys");
    let manner = Manner { rt_priority: None, poll: Duration::from_micros(5) };
    let plan = Plan::new(&pinning::allowed_cpus(), &[None; 2], &host, manner);
    let line = |slot: usize, record: &Arc<Record>| {
        let record = record.clone();
        let raise = Box::new(move |vector| record.raise(vector));
        TimerLine { slot: plan.slots()[slot].clone(), raise }
    };
    let features = Features { ref_counter: true, stimer: true, ..Default::default() };
    let stimer_record = Record::new(&timeline, false);
    let stimers = line(0, &stimer_record);
    let stimers = Arc::new(Processor::new(features, 0, timeline.clone(), Some(stimers)));
    let lapic_record = Record::new(&timeline, true);
    let lapic = Arc::new(LapicTimer::new(timeline.clone(), line(1, &lapic_record)));
    let timers: Vec<(_, Arc<dyn Timers>)> =
        vec![(plan.slots()[0].clone(), stimers.clone()), (plan.slots()[1].clone(), lapic.clone())];
    let clock: Arc<dyn Clock> = timeline.clone();
    let housekeeping = plan.start(timers, &clock).expect("threads");

    let started = Instant::now();
    let half = operations / 2;
    let (stimers, stimer_record) = (&*stimers, &*stimer_record);
    let (lapic, lapic_record) = (&*lapic, &*lapic_record);
    let [a, b] = std::thread::scope(|scope| {
        let a = scope.spawn(move || operate(stimers, stimer_record, 4, 1, half));
        let b = scope.spawn(move || operate(lapic, lapic_record, 1, tsc_hz / 10_000_000, half));
        [a, b].map(|thread| thread.join().expect("no failure"))
    });
    let elapsed = started.elapsed();
    println!(
        "{} operations in {elapsed:.1?}: early, lost and double fires 0",
        a.operations + b.operations
    );
    println!("synthetic timers: {a:?}\nTSC deadline: {b:?}");
    println!("threads: {:?}", housekeeping.tallies());
    assert!(a.fired > 0 && b.fired > 0 && a.cancelled > 0 && b.cancelled > 0);
}
