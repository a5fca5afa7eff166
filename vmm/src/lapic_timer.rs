//! The local APIC timer in TSC-deadline mode, served here instead of by KVM
//! (Intel SDM 3A §11.5.4.1).
//!
//! Writes of IA32_TSC_DEADLINE exit to the vCPU's thread, which reads the timer's
//! local vector there (KVM_GET_LAPIC) and arms a deadline for a housekeeping
//! thread. The local APIC itself stays in KVM, whose accesses to the local vector
//! never come here: what it says counts at the moment the deadline is written.
//! A timer armed while masked expires without an interrupt; one that is masked
//! after it was armed, and not disarmed, still interrupts once.

use crate::housekeeping::Timers;
use crate::registers;
use crate::timeline::Timeline;
use crate::timer_line::TimerLine;
use kvm_bindings::kvm_lapic_state;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// LVT timer register: vector, mask and mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalVector(pub u32);

impl LocalVector {
    /// Its place in the APIC's registers.
    const OFFSET: usize = 0x320;
    const MASKED: u32 = 1 << 16;
    const MODE: u32 = 3 << 17;
    const TSC_DEADLINE: u32 = 2 << 17;

    /// Takes it out of an APIC's registers.
    pub fn of(lapic: &kvm_lapic_state) -> Self {
        Self(registers::lapic_register(lapic, Self::OFFSET))
    }

    fn in_deadline_mode(self) -> bool {
        self.0 & Self::MODE == Self::TSC_DEADLINE
    }

    /// The vector to raise, if it is one that an APIC accepts.
    fn vector(self) -> Option<u8> {
        let vector = self.0 as u8;
        (self.0 & Self::MASKED == 0 && vector >= 16).then_some(vector)
    }
}

/// An armed timer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Armed {
    /// Guest TSC.
    deadline: u64,
    vector: Option<u8>,
}

/// The timer of one vCPU.
#[derive(Debug)]
pub struct LapicTimer {
    armed: Mutex<Option<Armed>>,
    timeline: Arc<Timeline>,
    line: TimerLine,
}

impl LapicTimer {
    /// A disarmed timer.
    pub fn new(timeline: Arc<Timeline>, line: TimerLine) -> Self {
        Self { armed: Mutex::new(None), timeline, line }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Armed>> {
        self.armed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// RDMSR: the deadline, or 0 when disarmed, expired or in another mode.
    pub fn read(&self, local: LocalVector) -> u64 {
        let mut armed = self.lock();
        if !local.in_deadline_mode() {
            *armed = None;
        }
        self.settle(&mut armed);
        armed.map_or(0, |armed| armed.deadline)
    }

    /// WRMSR: arms, or disarms by 0; in another mode a write does nothing. A past
    /// deadline expires before this returns.
    pub fn write(&self, deadline: u64, local: LocalVector) {
        let mut armed = self.lock();
        *armed = (local.in_deadline_mode() && deadline != 0)
            .then(|| Armed { deadline, vector: local.vector() });
        self.settle(&mut armed);
    }

    /// Fires if it is time, and publishes what is left to wait for.
    fn settle(&self, armed: &mut Option<Armed>) {
        if let Some(expired) = armed.take_if(|armed| armed.deadline <= self.timeline.guest_tsc())
            && let Some(vector) = expired.vector
        {
            (self.line.raise)(vector);
        }
        let at = |armed: Armed| self.timeline.first_10ns_after(armed.deadline);
        self.line.slot.publish(armed.map(at));
    }
}

impl Timers for LapicTimer {
    fn expire(&self) {
        self.settle(&mut self.lock());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host_cpus::{CpuList, HostCpu, HostCpus};
    use crate::housekeeping::{Manner, Plan};
    use std::sync::mpsc;

    const VECTOR: u8 = 0x40;
    const ON: LocalVector = LocalVector(LocalVector::TSC_DEADLINE | VECTOR as u32);
    const MASKED: LocalVector = LocalVector(ON.0 | LocalVector::MASKED);
    const PERIODIC: LocalVector = LocalVector(1 << 17 | VECTOR as u32);
    const FAR: u64 = u64::MAX / 2;

    /// A timer that no thread serves, and the vectors that it raises.
    fn timer() -> (LapicTimer, mpsc::Receiver<u8>) {
        let host = HostCpus {
            cpus: vec![HostCpu { number: 0, llc: 0, node: 0 }],
            set_apart: Default::default(),
        };
        let plan = Plan::new(&CpuList(vec![0]), &[None], &host, Manner::default());
        let (raised, vectors) = mpsc::channel();
        let raise = Box::new(move |vector| raised.send(vector).unwrap());
        let line = TimerLine { slot: plan.slots()[0].clone(), raise };
        let timeline = Arc::new(Timeline::start(2_000_000_000, 0).unwrap());
        (LapicTimer::new(timeline, line), vectors)
    }

    #[test]
    fn a_past_deadline_fires_at_once_and_once() {
        let (timer, vectors) = timer();
        timer.write(1, ON);
        assert_eq!(vectors.try_recv(), Ok(VECTOR));
        assert_eq!(timer.read(ON), 0);
        timer.expire();
        assert!(vectors.try_recv().is_err());
    }

    #[test]
    fn a_deadline_is_read_back_until_it_is_disarmed_or_the_mode_left() {
        let (timer, vectors) = timer();
        timer.write(FAR, ON);
        timer.expire();
        assert_eq!(timer.read(ON), FAR);
        timer.write(0, ON);
        assert_eq!(timer.read(ON), 0);
        timer.write(FAR, ON);
        assert_eq!(timer.read(PERIODIC), 0, "another mode has no deadline");
        assert_eq!(timer.read(ON), 0, "and leaving the mode disarms");
        timer.write(1, PERIODIC);
        assert!(vectors.try_recv().is_err(), "a write in another mode does nothing");
    }

    #[test]
    fn a_masked_timer_expires_in_silence() {
        let (timer, vectors) = timer();
        timer.write(1, MASKED);
        assert_eq!(timer.read(MASKED), 0);
        timer.write(1, LocalVector(LocalVector::TSC_DEADLINE | 15));
        assert!(vectors.try_recv().is_err(), "vectors below 16 are no interrupts");
    }

    #[test]
    fn the_vector_is_the_one_at_the_last_write() {
        let (timer, vectors) = timer();
        timer.write(FAR, ON);
        timer.write(1, LocalVector(LocalVector::TSC_DEADLINE | 0x50));
        assert_eq!(vectors.try_iter().collect::<Vec<_>>(), [0x50]);
    }
}
