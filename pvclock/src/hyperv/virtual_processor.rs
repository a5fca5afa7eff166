//! The MSRs of one virtual processor.

use super::{Effect, Features, MsrRead, MsrWrite, msr};
use crate::reference::Ticks100ns;
use crate::stimer::Stimer;

/// Synthetic timers per virtual processor.
pub const TIMERS: usize = 4;

/// The state of one virtual processor's MSRs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VirtualProcessor {
    /// What the VM offers; fixed.
    pub features: Features,
    /// [`msr::VP_INDEX`]; fixed.
    pub index: u32,
    /// [`msr::VP_ASSIST_PAGE`]. Linux sets it unconditionally; none of the assists
    /// it could carry is offered, so it is storage and no overlay.
    pub vp_assist: u64,
    /// The synthetic timers.
    pub timers: [Stimer; TIMERS],
}

/// Which register of a timer an MSR is.
enum TimerRegister {
    Config,
    Count,
}

impl VirtualProcessor {
    /// A virtual processor after reset.
    pub fn new(features: Features, index: u32) -> Self {
        Self { features, index, vp_assist: 0, timers: Default::default() }
    }

    /// RDMSR.
    pub fn read_msr(&self, msr: u32) -> MsrRead {
        if let Some((timer, register)) = self.timer_register(msr) {
            let timer = &self.timers[timer];
            return MsrRead::Handled(match register {
                TimerRegister::Config => timer.config,
                TimerRegister::Count => timer.count,
            });
        }
        match msr {
            msr::VP_INDEX => MsrRead::Handled(self.index.into()),
            msr::VP_ASSIST_PAGE => MsrRead::Handled(self.vp_assist),
            _ => MsrRead::NotHandled,
        }
    }

    /// WRMSR at reference time `now`.
    pub fn write_msr(&mut self, msr: u32, value: u64, now: Ticks100ns) -> MsrWrite {
        if let Some((timer, register)) = self.timer_register(msr) {
            let timer = &mut self.timers[timer];
            let written = match register {
                TimerRegister::Config => timer.write_config(value, now),
                TimerRegister::Count => {
                    timer.write_count(value, now);
                    Ok(())
                }
            };
            return match written {
                Ok(()) => MsrWrite::Handled(Some(Effect::Timer)),
                Err(_) => MsrWrite::Fault,
            };
        }
        match msr {
            msr::VP_INDEX => MsrWrite::Fault,
            msr::VP_ASSIST_PAGE => {
                self.vp_assist = value;
                MsrWrite::Handled(None)
            }
            _ => MsrWrite::NotHandled,
        }
    }

    /// The earliest time at which a timer is to fire.
    pub fn next_due(&self) -> Option<Ticks100ns> {
        self.timers.iter().filter_map(Stimer::due).min()
    }

    /// Expires every timer that is due at `now` and passes its vector to `fire`, at
    /// most once per timer.
    pub fn expire(&mut self, now: Ticks100ns, fire: impl FnMut(u8)) {
        self.timers.iter_mut().filter_map(|timer| timer.expire(now)).for_each(fire);
    }

    fn timer_register(&self, msr: u32) -> Option<(usize, TimerRegister)> {
        if !self.features.stimer || !(msr::STIMER0_CONFIG..=msr::STIMER3_COUNT).contains(&msr) {
            return None;
        }
        let place = msr - msr::STIMER0_CONFIG;
        let register =
            if place.is_multiple_of(2) { TimerRegister::Config } else { TimerRegister::Count };
        Some((place as usize / 2, register))
    }
}
