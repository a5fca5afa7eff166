//! The Hyper-V clock in user space: MSR accesses that the filter sends here.

use crate::housekeeping::Timers;
use crate::memory::{self, GuestMemory};
use crate::overlay::{Kind, Overlays};
use crate::timeline::Timeline;
use crate::timer_line::TimerLine;
use pvclock::hyperv::{
    Effect, Features, Frequencies, MsrRead, MsrWrite, Partition, VirtualProcessor,
    read_time_ref_count,
};
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Frequency of KVM's local APIC timer before its divider, in Hz (KVM API,
/// KVM_CAP_X86_APIC_BUS_CYCLES_NS: 1 ns by default).
pub const APIC_HZ: u64 = 1_000_000_000;

/// What all vCPUs of a machine share of the interface.
#[derive(Debug)]
pub struct HyperV {
    features: Features,
    timeline: Arc<Timeline>,
    memory: GuestMemory,
    /// Taken for the rare accesses that change the partition, never for the counter.
    shared: Mutex<Shared>,
    processors: Vec<Arc<Processor>>,
}

/// One virtual processor, and where its timers go if it has any.
#[derive(Debug)]
pub struct Processor {
    state: Mutex<VirtualProcessor>,
    timeline: Arc<Timeline>,
    line: Option<TimerLine>,
}

#[derive(Debug)]
struct Shared {
    partition: Partition,
    overlays: Overlays,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl HyperV {
    /// A partition after reset, with a virtual processor for each of `lines`, which
    /// are there if synthetic timers are.
    pub fn new(
        features: Features,
        lines: Vec<Option<TimerLine>>,
        timeline: Arc<Timeline>,
        memory: GuestMemory,
    ) -> Self {
        let frequencies = Frequencies { tsc_hz: timeline.nominal_hz(), apic_hz: APIC_HZ };
        let shared = Shared {
            partition: Partition::new(features, frequencies),
            overlays: Overlays::new(memory.clone()),
        };
        let processor =
            |(index, line)| Arc::new(Processor::new(features, index, timeline.clone(), line));
        let processors = (0..).zip(lines).map(processor).collect();
        Self { features, timeline, memory, shared: Mutex::new(shared), processors }
    }

    /// Runs `change`, which may move the reference clock to another line, with the
    /// page not valid; then publishes the line that holds, under a new sequence.
    ///
    /// No page shows the old line once a counter read may use the new one, nor the
    /// new line while one may still use the old: so page₁ ≤ MSR ≤ page₂ holds
    /// across the change. The guest cannot move its page meanwhile.
    pub fn around_change<R>(&self, change: impl FnOnce() -> R) -> R {
        let mut shared = lock(&self.shared);
        shared.overlays.invalidate();
        // The switch must not become visible before the invalid page is.
        fence(Ordering::SeqCst);
        let result = change();
        shared.overlays.republish(&self.timeline.clock());
        result
    }

    /// The virtual processors, whose timers a housekeeping thread is to serve.
    pub fn processors(&self) -> &[Arc<Processor>] {
        &self.processors
    }

    /// RDMSR on vCPU `index`.
    pub fn read_msr(&self, index: usize, msr: u32) -> MsrRead {
        read_time_ref_count(&self.features, msr, || self.timeline.now())
            .or_else(|| self.processors[index].read_msr(msr))
            .or_else(|| lock(&self.shared).partition.read_msr(msr))
    }

    /// WRMSR on vCPU `index`.
    pub fn write_msr(&self, index: usize, msr: u32, value: u64) -> MsrWrite {
        self.processors[index].write_msr(msr, value).or_else(|| {
            let mut shared = lock(&self.shared);
            let written = shared
                .partition
                .write_msr(msr, value, |gpa| memory::is_ram_page(&self.memory, gpa));
            if let MsrWrite::Handled(Some(effect)) = written {
                shared.apply(effect, &self.timeline);
            }
            written
        })
    }
}

impl Processor {
    /// Virtual processor `index` after reset.
    pub fn new(
        features: Features,
        index: u32,
        timeline: Arc<Timeline>,
        line: Option<TimerLine>,
    ) -> Self {
        Self { state: Mutex::new(VirtualProcessor::new(features, index)), timeline, line }
    }

    /// Where its timers publish their deadlines, if it has any.
    pub fn line(&self) -> Option<&TimerLine> {
        self.line.as_ref()
    }

    /// RDMSR.
    pub fn read_msr(&self, msr: u32) -> MsrRead {
        lock(&self.state).read_msr(msr)
    }

    /// WRMSR. A timer that is due at once has fired when this returns.
    pub fn write_msr(&self, msr: u32, value: u64) -> MsrWrite {
        let mut state = lock(&self.state);
        let written = state.write_msr(msr, value, self.timeline.now());
        if written == MsrWrite::Handled(Some(Effect::Timer)) {
            self.settle(&mut state);
        }
        written
    }

    /// Fires what is due, and publishes the next deadline.
    ///
    /// All under the lock: when a guest's write that cancels a timer returns, the
    /// interrupt either is pending already or never comes.
    fn settle(&self, state: &mut VirtualProcessor) {
        if let Some(line) = &self.line {
            state.expire(self.timeline.now(), |vector| (line.raise)(vector));
            line.slot.publish(state.next_due().map(|due| due.0.saturating_mul(10)));
        }
    }
}

impl Timers for Processor {
    fn expire(&self) {
        self.settle(&mut lock(&self.state));
    }
}

impl Shared {
    fn apply(&mut self, effect: Effect, timeline: &Timeline) {
        let (kind, page) = match effect {
            Effect::HypercallPage(page) => (Kind::Hypercall, page),
            Effect::ReferenceTscPage(page) => (Kind::ReferenceTsc, page),
            // Neither comes from the partition while no invariant TSC is offered.
            Effect::Timer | Effect::InvariantTsc(_) => return,
        };
        self.overlays.shift(kind, page.from, page.to, &timeline.clock());
    }
}
