//! The latch under a storm of signals: a timer interrupts two readers and the writer
//! at their work, and its handler reads the same latch.
//!
//! A handler that waited for the writer it interrupted would never return, and one
//! that saw half of a clock would see it out of order or out of place.
//! `LATCH_READS=9000000` is the full count; the test says what it did.

#![allow(clippy::unwrap_used)] // a failed unwrap is a failed test

use pvclock::latch::Latch;
use pvclock::reference::ReferenceClock;
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const HZ: u64 = 2_445_430_000;
/// The timers' period: 25 kHz on each thread.
const PERIOD_NS: i64 = 40_000;
/// Reads in each signal.
const READS: u64 = 64;
/// Pause between two updates, 10 kHz at most.
const BETWEEN_UPDATES: Duration = Duration::from_micros(100);

static LATCH: std::sync::OnceLock<Latch> = std::sync::OnceLock::new();
static SIGNALS: AtomicU64 = AtomicU64::new(0);
static READS_IN_SIGNALS: AtomicU64 = AtomicU64::new(0);
static SIGNALS_IN_UPDATES: AtomicU64 = AtomicU64::new(0);
static BACKWARD: AtomicU64 = AtomicU64::new(0);
static TORN: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// No read on this thread that begins later may be below this, 10 ns units.
    static FLOOR: Cell<u64> = const { Cell::new(0) };
    static UPDATING: Cell<bool> = const { Cell::new(false) };
}

/// One reading; a clock whose parts do not belong together is seen by its scale.
fn read_once(latch: &Latch) {
    let floor = FLOOR.get();
    let (now, whole) = latch.sample(|clock| {
        let now = clock.ticks_10ns(vmm::tsc::read_ordered());
        let whole = ReferenceClock::with_offset(clock.tsc_hz(), clock.offset());
        (now, whole.is_ok_and(|whole| whole == *clock))
    });
    TORN.fetch_add(u64::from(!whole), Ordering::Relaxed);
    BACKWARD.fetch_add(u64::from(now < floor), Ordering::Relaxed);
    // A signal since the read may have raised it already.
    FLOOR.set(FLOOR.get().max(now));
}

extern "C" fn on_timer(_: libc::c_int) {
    let Some(latch) = LATCH.get() else { return };
    for _ in 0..READS {
        read_once(latch);
    }
    SIGNALS.fetch_add(1, Ordering::Relaxed);
    READS_IN_SIGNALS.fetch_add(READS, Ordering::Relaxed);
    SIGNALS_IN_UPDATES.fetch_add(u64::from(UPDATING.get()), Ordering::Relaxed);
}

/// A POSIX timer that signals the calling thread.
struct ThreadTimer(libc::timer_t);

impl ThreadTimer {
    fn start() -> Self {
        // SAFETY: both structures are plain data that zero is valid for; the calls read
        // them and write `timer`; the thread named is the calling one.
        unsafe {
            let mut event: libc::sigevent = std::mem::zeroed();
            event.sigev_notify = libc::SIGEV_THREAD_ID;
            event.sigev_signo = libc::SIGRTMIN() + 3;
            event.sigev_notify_thread_id = libc::gettid();
            let mut timer = std::ptr::null_mut();
            let made = libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer);
            assert_eq!(made, 0, "timer_create");
            let period = libc::timespec { tv_sec: 0, tv_nsec: PERIOD_NS };
            let spec = libc::itimerspec { it_interval: period, it_value: period };
            let set = libc::timer_settime(timer, 0, &raw const spec, std::ptr::null_mut());
            assert_eq!(set, 0, "timer_settime");
            Self(timer)
        }
    }
}

impl Drop for ThreadTimer {
    fn drop(&mut self) {
        // SAFETY: made by timer_create, deleted once.
        unsafe { libc::timer_delete(self.0) };
    }
}

#[test]
fn interrupted_readers_and_an_interrupted_writer_agree() {
    let wanted: u64 =
        std::env::var("LATCH_READS").ok().and_then(|n| n.parse().ok()).unwrap_or(300_000);
    let clock = ReferenceClock::starting_at(HZ, vmm::tsc::read_ordered()).unwrap();
    let latch = LATCH.get_or_init(|| Latch::new(clock));
    // SAFETY: `sigaction` is plain data, zeroed to the empty mask; the handler reads
    // atomics and thread-locals without destructors, and calls nothing that waits.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_timer as extern "C" fn(libc::c_int) as libc::sighandler_t;
        action.sa_flags = libc::SA_RESTART;
        libc::sigaction(libc::SIGRTMIN() + 3, &raw const action, std::ptr::null_mut());
    }
    let done = AtomicBool::new(false);
    let (main_reads, mut updates) = (AtomicU64::new(0), 0u64);
    let start = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let _timer = ThreadTimer::start();
                while !done.load(Ordering::Relaxed) {
                    read_once(latch);
                    main_reads.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let timer = ThreadTimer::start();
        while READS_IN_SIGNALS.load(Ordering::Relaxed) < wanted {
            // The rate swings within 100 ppb; each line begins where the last one is.
            let hz = HZ + updates % 2 * 244;
            UPDATING.set(true);
            latch.update(|clock| {
                let now = vmm::tsc::read_ordered();
                clock.with_frequency_within(now..=now + HZ, hz).unwrap()
            });
            UPDATING.set(false);
            updates += 1;
            let next = Instant::now() + BETWEEN_UPDATES;
            while Instant::now() < next {
                std::hint::spin_loop();
            }
        }
        drop(timer);
        done.store(true, Ordering::Relaxed);
    });
    let seconds = start.elapsed().as_secs_f64();
    let count = |cell: &AtomicU64| cell.load(Ordering::Relaxed);
    println!(
        "{} interrupted reads in {} signals ({:.0} a second on three threads, {} inside an \
         update), {} other reads, {updates} updates ({:.0} a second): {} backward, {} torn",
        count(&READS_IN_SIGNALS),
        count(&SIGNALS),
        count(&SIGNALS) as f64 / seconds,
        count(&SIGNALS_IN_UPDATES),
        count(&main_reads),
        updates as f64 / seconds,
        count(&BACKWARD),
        count(&TORN),
    );
    assert_eq!((count(&BACKWARD), count(&TORN)), (0, 0));
    assert!(updates > 100, "no writer to speak of");
}
