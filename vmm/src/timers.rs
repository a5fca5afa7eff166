//! Which timers this process serves for the guest, and which threads wait for them.

use crate::cli::{HpetMode, HvImpl, LapicTimer as LapicTimerOption, RunOptions};
use crate::error::{Error, Result};
use crate::host_cpus::{CpuList, HostCpus};
use crate::housekeeping::{self, Housekeeping, Manner, Plan, Slot, Timers};
use crate::hyperv::HyperV;
use crate::lapic_timer::LapicTimer;
use crate::pinning::{self, Place};
use crate::probe::{self, Answer};
use crate::timeline::Timeline;
use crate::timer_line::TimerLine;
use crate::topology::Topology;
use kvm_ioctls::{Kvm, VmFd};
use std::sync::Arc;
use std::time::Duration;

/// The machine's timers, settled before the machine is made.
pub struct TimerPlan {
    /// Where each vCPU's thread runs.
    pub places: Vec<Place>,
    /// Whether the local APIC timers are served here.
    pub offload: bool,
    plan: Plan,
    /// One slot a vCPU, or none.
    stimers: Vec<Slot>,
    lapic_timers: Vec<Slot>,
    /// The HPET's slot, unless it is off.
    pub hpet: Option<Slot>,
}

impl TimerPlan {
    /// Settles what `options` ask for.
    ///
    /// # Errors
    /// One line: a CPU that is not there, or a host that cannot do it.
    pub fn new(options: &RunOptions, cpus: u32, kvm: &Kvm) -> Result<Self> {
        let offload = offloads_lapic_timer(options, kvm)?;
        let host = HostCpus::read()?;
        let own = match &options.pin {
            Some(pinning) => pinning.resolve(cpus, &host)?,
            None => vec![None; cpus as usize],
        };
        let groups = [serves_stimers(options)?, offload]
            .map(|served| if served { own.clone() } else { vec![] });
        let mut wanted = groups.concat();
        // The HPET alone, that few guests arm, is no reason for a thread on each CPU.
        let keepers = if wanted.is_empty() && options.housekeeping.is_none() {
            CpuList::default()
        } else {
            let asked = options.housekeeping.as_ref();
            housekeeping::cpus(asked, &own, &pinning::allowed_cpus(), &host)?
        };
        wanted.extend((options.hpet != HpetMode::Off).then_some(None));
        if options.rt_prio.is_some() && options.hk_poll > 0 && !wanted.is_empty() {
            let free = |cpu: &Option<u32>| cpu.is_some_and(|cpu| !keepers.0.contains(&cpu));
            if keepers.0.is_empty() || !own.iter().all(free) {
                return Err(Error::new(
                    "--hk-poll with --rt-prio: a timer thread that spins would keep vCPUs off \
                     its CPU; name one for each with --pin, and others with --housekeeping",
                ));
            }
        }
        let rt_priority = options.rt_prio;
        // Beside a guest that never halts, a thread of the same priority would not run.
        let above = rt_priority.map(|priority| priority + 1);
        let manner =
            Manner { rt_priority: above, poll: Duration::from_micros(options.hk_poll.into()) };
        let plan = Plan::new(&keepers, &wanted, &host, manner);
        let (stimers, others) = plan.slots().split_at(groups[0].len());
        let (lapic_timers, hpet) = others.split_at(groups[1].len());
        let (stimers, lapic_timers) = (stimers.to_vec(), lapic_timers.to_vec());
        let hpet = hpet.first().cloned();
        let places = own.into_iter().map(|cpu| Place { cpu, rt_priority }).collect();
        Ok(Self { places, offload, plan, stimers, lapic_timers, hpet })
    }

    /// The wires of each virtual processor's synthetic timers.
    pub fn stimer_lines(&self, vm: &Arc<VmFd>, topology: Topology) -> Vec<Option<TimerLine>> {
        let lines = lines(&self.stimers, vm, topology).map(Some);
        let without = self.places.len() - self.stimers.len();
        lines.chain((0..without).map(|_| None)).collect()
    }

    /// The local APIC timers.
    pub fn lapic_timers(
        &self,
        vm: &Arc<VmFd>,
        topology: Topology,
        timeline: &Arc<Timeline>,
    ) -> Vec<Arc<LapicTimer>> {
        let timer = |line| Arc::new(LapicTimer::new(timeline.clone(), line));
        lines(&self.lapic_timers, vm, topology).map(timer).collect()
    }

    /// Starts the housekeeping threads.
    ///
    /// # Errors
    /// See [`Plan::start`].
    pub fn start(
        self,
        hyperv: Option<&HyperV>,
        lapic_timers: &[Arc<LapicTimer>],
        hpet: Option<Arc<dyn Timers>>,
        timeline: &Arc<Timeline>,
    ) -> Result<Housekeeping> {
        let processors = hyperv.map_or(&[][..], HyperV::processors).iter();
        let stimers = processors.map(|p| p.clone() as Arc<dyn Timers>);
        let lapic_timers = lapic_timers.iter().map(|t| t.clone() as Arc<dyn Timers>);
        let timers = self.stimers.into_iter().zip(stimers);
        let timers = timers.chain(self.lapic_timers.into_iter().zip(lapic_timers));
        let timers = timers.chain(self.hpet.into_iter().zip(hpet));
        let clock: Arc<dyn devices::clock::Clock> = timeline.clone();
        self.plan.start(timers.collect(), &clock)
    }
}

fn lines(slots: &[Slot], vm: &Arc<VmFd>, topology: Topology) -> impl Iterator<Item = TimerLine> {
    let ids = (0..).map(move |index| topology.apic_id(index));
    slots.iter().zip(ids).map(|(slot, id)| TimerLine::to_apic(slot.clone(), vm.clone(), id))
}

fn serves_stimers(options: &RunOptions) -> Result<bool> {
    if options.hv_stimer && options.hv_impl == HvImpl::Kernel {
        return Err(Error::new("--hv-stimer: synthetic timers are ours only; use --hv-impl user"));
    }
    Ok(options.hv_stimer)
}

/// Whether the local APIC timers are taken from KVM.
fn offloads_lapic_timer(options: &RunOptions, kvm: &Kvm) -> Result<bool> {
    if options.lapic_timer == LapicTimerOption::Kernel {
        return Ok(false);
    }
    match probe::tsc_deadline_msr_exits(kvm) {
        Answer::Yes => Ok(true),
        Answer::No => Err(Error::new(
            "--lapic-timer offload: this host's KVM serves IA32_TSC_DEADLINE itself, whatever its \
             MSR filter says; use --hv-stimer, which needs no filter for it",
        )),
        Answer::Unknown => Err(Error::new(
            "--lapic-timer offload: this host's KVM does not let us find out whether it filters \
             IA32_TSC_DEADLINE; use --hv-stimer",
        )),
    }
}
