use super::*;
use crate::host_cpus::HostCpu;
use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Two nodes, two caches a node, two CPUs a cache.
fn host() -> HostCpus {
    let cpu = |number| HostCpu { number, llc: number / 2 * 2, node: number / 4 };
    HostCpus { cpus: (0..8).map(cpu).collect(), set_apart: BTreeSet::new() }
}

fn assign_to(places: &[Option<u32>], keepers: &[u32]) -> Vec<usize> {
    let keepers: Vec<_> = keepers.iter().copied().map(Some).collect();
    assignment::assign(places, &keepers, &host())
}

fn assign(places: &[u32], keepers: &[u32]) -> Vec<u32> {
    let places: Vec<_> = places.iter().copied().map(Some).collect();
    let chosen = assign_to(&places, keepers);
    chosen.into_iter().map(|keeper| keepers[keeper]).collect()
}

#[test]
fn the_nearest_thread_serves_and_load_decides_among_equals() {
    assert_eq!(assign(&[1, 3, 5, 7], &[0, 2, 4, 6]), [0, 2, 4, 6], "same cache");
    assert_eq!(assign(&[1, 1, 1], &[0, 2]), [0, 0, 0], "a cache outweighs load");
    assert_eq!(assign(&[2, 3, 7], &[0, 4]), [0, 0, 4], "same node");
    assert_eq!(assign(&[4, 5, 6, 7], &[0, 1]), [0, 1, 0, 1], "load, where all are far");
    let anywhere = assign_to(&[None; 4], &[0, 4]);
    assert_eq!(anywhere, [0, 1, 0, 1]);
}

#[test]
fn by_default_threads_keep_off_vcpus_and_cpus_set_apart() {
    let mut host = host();
    host.set_apart = BTreeSet::from([6, 7]);
    let all = host.list();
    let cpus = |asked: Option<&str>, vcpus: &[Option<u32>], allowed: &CpuList| {
        let asked = asked.map(|text| text.parse().unwrap());
        super::cpus(asked.as_ref(), vcpus, allowed, &host).map(|c| c.to_string())
    };
    assert_eq!(cpus(None, &[Some(0), None, Some(2)], &all).unwrap(), "1,3-5");
    assert_eq!(cpus(None, &[], &CpuList(vec![2, 3])).unwrap(), "2-3");
    assert_eq!(cpus(Some("6-7"), &[Some(6)], &all).unwrap(), "6-7", "what is asked for");
    assert!(cpus(Some("9999"), &[], &all).unwrap_err().to_string().contains("CPU 9999"));
    let full: Vec<_> = (0..8).map(Some).collect();
    assert_eq!(cpus(None, &full, &all).unwrap(), "0-7", "beside vCPUs rather than nowhere");
}

/// A clock that follows the host's and counts its readings.
struct HostClock {
    start: Instant,
    readings: AtomicU64,
}

impl Clock for HostClock {
    fn now_10ns(&self) -> u64 {
        self.readings.fetch_add(1, Ordering::Relaxed);
        (self.start.elapsed().as_nanos() / 10) as u64
    }
}

/// Notes when it is called.
struct Alarm {
    clock: Arc<HostClock>,
    calls: Mutex<mpsc::Sender<u64>>,
}

impl Timers for Alarm {
    fn expire(&self) {
        let _ = self.calls.lock().unwrap().send(self.clock.now_10ns());
    }
}

fn alarm(
    cpus: &CpuList,
    poll: Duration,
) -> (Housekeeping, Slot, Arc<HostClock>, mpsc::Receiver<u64>) {
    let clock = Arc::new(HostClock { start: Instant::now(), readings: AtomicU64::new(0) });
    let (calls, called) = mpsc::channel();
    let alarm = Arc::new(Alarm { clock: clock.clone(), calls: Mutex::new(calls) });
    let host = HostCpus::read().unwrap();
    let plan = Plan::new(cpus, &[None], &host, Manner { rt_priority: None, poll });
    let slot = plan.slots()[0].clone();
    let shared: Arc<dyn Clock> = clock.clone();
    let housekeeping = plan.start(vec![(slot.clone(), alarm)], &shared).unwrap();
    (housekeeping, slot, clock, called)
}

const LONG: Duration = Duration::from_secs(30);

#[test]
fn an_earlier_deadline_is_not_slept_over_and_none_is_early() {
    for poll in [Duration::ZERO, Duration::from_micros(50)] {
        let cpus = crate::pinning::allowed_cpus();
        let (housekeeping, slot, clock, called) = alarm(&cpus, poll);
        slot.publish(Some(clock.now_10ns() + 360_000_000_000));
        for us in [0, 10, 300, 2000] {
            let deadline = clock.now_10ns() + us * 100;
            slot.publish(Some(deadline));
            let at = called.recv_timeout(LONG).unwrap();
            assert!(at >= deadline, "{at} is before {deadline}");
        }
        slot.publish(Some(clock.now_10ns() + 360_000_000_000));
        slot.publish(None);
        housekeeping.clock_changed();
        called.recv_timeout(LONG).unwrap();
        drop(housekeeping);
        assert!(called.try_recv().is_err(), "a cancelled deadline, or one served twice");
    }
}

#[test]
fn who_does_not_poll_does_not_spin_however_near_the_deadlines_are() {
    let cpus = crate::pinning::allowed_cpus();
    let (_housekeeping, slot, clock, called) = alarm(&cpus, Duration::ZERO);
    const DEADLINES: u64 = 200;
    for _ in 0..DEADLINES {
        slot.publish(Some(clock.now_10ns() + 9_000));
        called.recv_timeout(LONG).unwrap();
    }
    // Two each are the test's own; some for each sleep; thousands for 90 µs of spinning.
    let readings = clock.readings.load(Ordering::Relaxed);
    assert!(readings <= 50 * DEADLINES, "{readings} readings for {DEADLINES} deadlines");
}

#[test]
fn each_thread_is_named_and_confined_to_its_own_cpu() {
    let cpus = crate::pinning::allowed_cpus();
    let (_housekeeping, ..) = alarm(&cpus, Duration::ZERO);
    // Other tests of this process may run such threads, too: the CPUs are the same.
    let mut seen = BTreeSet::new();
    for task in std::fs::read_dir("/proc/self/task").unwrap() {
        let task = task.unwrap().path();
        let read = |name| std::fs::read_to_string(task.join(name)).unwrap_or_default();
        if let Some(cpu) = read("comm").trim().strip_prefix("hk-") {
            let status = read("status");
            let allowed = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:"));
            let Some(allowed) = allowed else { continue };
            assert_eq!(allowed.trim(), cpu);
            seen.insert(cpu.parse::<u32>().unwrap());
        }
    }
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), cpus.0);
}

/// A clock that moves by hand.
struct Hand(AtomicU64);

impl Clock for Hand {
    fn now_10ns(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }
}

struct Ring(Mutex<mpsc::Sender<()>>);

impl Timers for Ring {
    fn expire(&self) {
        let _ = self.0.lock().unwrap().send(());
    }
}

#[test]
fn while_the_clock_stands_the_thread_rests_and_afterwards_goes_on() {
    for poll in [Duration::ZERO, Duration::from_secs(1)] {
        let (ring, rings) = mpsc::channel();
        let clock = Arc::new(Hand(AtomicU64::new(1000)));
        let host = HostCpus::read().unwrap();
        let manner = Manner { rt_priority: None, poll };
        let plan = Plan::new(&crate::pinning::allowed_cpus(), &[None], &host, manner);
        let slot = plan.slots()[0].clone();
        let shared: Arc<dyn Clock> = clock.clone();
        let timers: Arc<dyn Timers> = Arc::new(Ring(Mutex::new(ring)));
        let housekeeping = plan.start(vec![(slot.clone(), timers)], &shared).unwrap();
        slot.publish(Some(1001));
        let wakeups = || housekeeping.tallies().iter().map(|t| t.wakeups).sum::<u64>();
        // Long enough for thousands of sleeps of 10 ns.
        assert!(rings.recv_timeout(Duration::from_millis(300)).is_err(), "early");
        assert!(wakeups() <= 2 * u64::from(desk::STANDING), "{} wake-ups", wakeups());
        clock.0.store(1001, Ordering::SeqCst);
        housekeeping.clock_changed();
        rings.recv_timeout(LONG).unwrap();
    }
}
