//! The Hyper-V interface as far as a guest's clocks need it: what CPUID announces
//! and what the synthetic MSRs do.
//!
//! An MSR access passes three servers in turn, each of which takes it or says
//! `NotHandled`; they are split by what the VMM must hold to call them.
//!
//! | server | serves | needs |
//! |---|---|---|
//! | [`read_time_ref_count`] | the reference counter | nothing but the clock |
//! | [`VirtualProcessor`] | VP index, VP assist, timers | that VP |
//! | [`Partition`] | the rest of [`msr::RANGE`] | the whole partition |
//!
//! [`Partition`] comes last and answers `Fault` for every MSR of the range that
//! nobody offers, so that `NotHandled` from it means "not Hyper-V's". Only the VMM
//! turns a `Fault` into #GP.
//!
//! No hypercall is offered and no synthetic interrupt controller (SynIC): timers
//! raise their vector directly.

mod cpuid;
pub mod msr;
mod partition;
mod virtual_processor;

pub use cpuid::{CPUID_1_ECX_HYPERVISOR, CpuidLeaf, cpuid_leaves};
pub use partition::{Frequencies, HYPERCALL_PAGE, Partition};
pub use virtual_processor::{TIMERS, VirtualProcessor};

use crate::reference::Ticks100ns;

/// What the VM offers. The VP index, frequency, guest OS id and hypercall MSRs
/// come with any Hyper-V interface and have no switch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// The reference counter MSR.
    pub ref_counter: bool,
    /// The reference TSC page.
    pub tsc_page: bool,
    /// Synthetic timers, in direct mode only.
    pub stimer: bool,
    /// The guest may ask for an invariant TSC. Linux then prefers plain `tsc`.
    pub invariant_tsc: bool,
}

/// The outcome of RDMSR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum MsrRead {
    /// Not an MSR of this server: ask the next one.
    NotHandled,
    /// The MSR's value.
    Handled(u64),
    /// The guest gets #GP.
    Fault,
}

impl MsrRead {
    /// This outcome, or `next`'s if the MSR is not handled yet.
    pub fn or_else(self, next: impl FnOnce() -> Self) -> Self {
        if self == Self::NotHandled { next() } else { self }
    }
}

/// The outcome of WRMSR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum MsrWrite {
    /// Not an MSR of this server: ask the next one.
    NotHandled,
    /// Done, save for what the VMM must do about it.
    Handled(Option<Effect>),
    /// The guest gets #GP; nothing changed.
    Fault,
}

impl MsrWrite {
    /// This outcome, or `next`'s if the MSR is not handled yet.
    pub fn or_else(self, next: impl FnOnce() -> Self) -> Self {
        if self == Self::NotHandled { next() } else { self }
    }
}

/// What a write asks of the VMM, before the guest goes on.
///
/// An overlay covers guest RAM without changing it: where `from` is uncovered,
/// the RAM beneath shows again. Both overlays may be asked for the same page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The hypercall page, with the contents [`HYPERCALL_PAGE`], moves.
    HypercallPage(OverlayMove),
    /// The reference TSC page moves.
    ReferenceTscPage(OverlayMove),
    /// A timer was set or stopped: [`VirtualProcessor::next_due`] has news, and may
    /// already be past.
    Timer,
    /// CPUID.80000007H:EDX\[8\] is to show this from now on.
    InvariantTsc(bool),
}

/// Page-aligned guest physical addresses between which an overlay moves; `None`
/// is nowhere. The two differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OverlayMove {
    /// Where the overlay was.
    pub from: Option<u64>,
    /// Where it is to be.
    pub to: Option<u64>,
}

/// RDMSR of the reference counter; `now` reads the clock. No lock, no state.
///
/// TLFS, "Partition Reference Counter MSR". Writes fault, in [`Partition`].
#[inline]
pub fn read_time_ref_count(
    features: &Features,
    msr: u32,
    now: impl FnOnce() -> Ticks100ns,
) -> MsrRead {
    match (msr, features.ref_counter) {
        (msr::TIME_REF_COUNT, true) => MsrRead::Handled(now().0),
        (msr::TIME_REF_COUNT, false) => MsrRead::Fault,
        _ => MsrRead::NotHandled,
    }
}

#[cfg(test)]
mod tests;
