//! Pause and continue: what stands still, and what does not.
//!
//! Paused through the control socket, the monitor or SIGTSTP, no vCPU runs and
//! **reference time stands still**: counter MSR, TSC page, synthetic timers, HPET
//! and PM timer go on from where they stopped, less than two ticks (200 ns)
//! forward, never back. Their timers come as late as the pause was long.
//!
//! What belongs to the host goes on: the RTC tells the host's CLOCK_REALTIME, and
//! a guest reads it again when it wants the date. **The TSC goes on** too, for it is
//! the processor's (moving it back at each pause would make a guest that trusts its
//! invariance wrong, and some hosts cannot); the reference clock's offset absorbs
//! it. A deadline in TSC units, the local APIC's, that passed meanwhile is due at
//! once when the vCPU runs: one interrupt, however long the pause. So is the
//! in-kernel PIT's and a periodic local APIC timer's. A guest on kvm-clock is told
//! that it was stopped (KVM_KVMCLOCK_CTRL), so that its watchdogs do not bark.
//!
//! SIGSTOP cannot be noticed and is no pause: reference time passes, as it does on
//! a machine whose processors were busy with something else. Every timer that
//! became due is late by the stop, once.

use crate::lifecycle::State;
use crate::machine::Shared;

impl Shared {
    /// Stops all vCPUs, then time. Does nothing in a paused or ending machine.
    pub fn pause(&self) {
        if self.lifecycle.state() == State::Running {
            self.lifecycle.pause();
            self.change_clock(|| self.timeline.stop());
        }
    }

    /// Lets time go on, then the vCPUs. Does nothing in a machine that is not paused.
    pub fn resume(&self) {
        if self.lifecycle.state() == State::Paused {
            self.change_clock(|| self.timeline.start_again());
            self.lifecycle.resume();
        }
    }

    /// Runs `change`, which may move the timeline to another line, such that no
    /// guest sees time step back, publishes the TSC page anew, and has every timer's
    /// deadline looked at.
    pub fn change_clock<R>(&self, change: impl FnOnce() -> R) -> R {
        let changed = match &self.peripherals.hyperv {
            Some(hyperv) => hyperv.around_change(change),
            None => change(),
        };
        self.housekeeping.clock_changed();
        changed
    }
}
