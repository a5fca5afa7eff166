//! Pages that Hyper-V lays over guest RAM (TLFS, "GPA Overlay Pages").
//!
//! What lies beneath is kept, and shows again when the overlay goes or moves.

use crate::memory::GuestMemory;
use pvclock::hyperv::HYPERCALL_PAGE;
use pvclock::reference::ReferenceClock;
use pvclock::tsc_page::{self, PageMemory};
use std::sync::atomic::Ordering;
use vm_memory::{Bytes, GuestAddress};

const PAGE: usize = tsc_page::PAGE_SIZE;

/// Which overlay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Code that answers hypercalls.
    Hypercall,
    /// The reference TSC page.
    ReferenceTsc,
}

/// A covered page: the RAM beneath, and what lies on it, the uppermost last.
#[derive(Debug)]
struct Covered {
    gpa: u64,
    ram: Vec<u8>,
    overlays: Vec<Kind>,
}

/// All overlays of a machine: two at most.
#[derive(Debug)]
pub struct Overlays {
    memory: GuestMemory,
    covered: Vec<Covered>,
    /// Sequence that the reference TSC page last carried.
    sequence: u32,
}

/// One guest page as the publication protocol sees it.
struct GuestPage<'a> {
    memory: &'a GuestMemory,
    gpa: u64,
}

impl PageMemory for GuestPage<'_> {
    fn store_u64(&self, offset: usize, value: u64) {
        let address = GuestAddress(self.gpa + offset as u64);
        // Aligned and inside RAM: the page was checked when it was enabled.
        let _ = self.memory.store(value.to_le(), address, Ordering::Relaxed);
    }
}

impl Overlays {
    /// None yet.
    pub fn new(memory: GuestMemory) -> Self {
        Self { memory, covered: Vec::new(), sequence: 0 }
    }

    /// Moves an overlay; `from` and `to` are whole RAM pages.
    pub fn shift(
        &mut self,
        kind: Kind,
        from: Option<u64>,
        to: Option<u64>,
        clock: &ReferenceClock,
    ) {
        if let Some(gpa) = from {
            self.uncover(kind, gpa, clock);
        }
        if let Some(gpa) = to {
            self.cover(kind, gpa, clock);
        }
    }

    /// Makes the reference TSC page, if there is one, show `clock`; no page shows a
    /// clock that stands still.
    pub fn republish(&mut self, clock: &ReferenceClock) {
        if let Some(gpa) = self.shown()
            && !clock.is_stopped()
        {
            let page = GuestPage { memory: &self.memory, gpa };
            self.sequence = tsc_page::publish(&page, clock, self.sequence);
        }
    }

    /// Makes the guest use the counter MSR until the next [`Self::republish`].
    pub fn invalidate(&self) {
        if let Some(gpa) = self.shown() {
            tsc_page::invalidate(&GuestPage { memory: &self.memory, gpa });
        }
    }

    /// Where the guest sees the reference TSC page.
    fn shown(&self) -> Option<u64> {
        let shows = |covered: &&Covered| covered.overlays.last() == Some(&Kind::ReferenceTsc);
        self.covered.iter().find(shows).map(|covered| covered.gpa)
    }

    fn cover(&mut self, kind: Kind, gpa: u64, clock: &ReferenceClock) {
        if let Some(covered) = self.covered.iter_mut().find(|c| c.gpa == gpa) {
            covered.overlays.push(kind);
        } else {
            let mut ram = vec![0; PAGE];
            let _ = self.memory.read_slice(&mut ram, GuestAddress(gpa));
            self.covered.push(Covered { gpa, ram, overlays: vec![kind] });
        }
        self.draw(kind, gpa, clock);
    }

    fn uncover(&mut self, kind: Kind, gpa: u64, clock: &ReferenceClock) {
        let Some(place) = self.covered.iter().position(|c| c.gpa == gpa) else { return };
        let covered = &mut self.covered[place];
        covered.overlays.retain(|k| *k != kind);
        if let Some(beneath) = covered.overlays.last().copied() {
            self.draw(beneath, gpa, clock);
        } else {
            let covered = self.covered.swap_remove(place);
            let _ = self.memory.write_slice(&covered.ram, GuestAddress(gpa));
        }
    }

    fn draw(&mut self, kind: Kind, gpa: u64, clock: &ReferenceClock) {
        let mut page = [0; PAGE];
        if kind == Kind::Hypercall {
            page[..HYPERCALL_PAGE.len()].copy_from_slice(&HYPERCALL_PAGE);
        }
        let _ = self.memory.write_slice(&page, GuestAddress(gpa));
        if kind == Kind::ReferenceTsc {
            self.republish(clock);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pvclock::tsc_page::DecodedPage;

    fn overlays() -> Overlays {
        let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 16 * PAGE)]).unwrap();
        for page in 0..16 {
            memory.write_slice(&[page as u8; PAGE], GuestAddress(page * PAGE as u64)).unwrap();
        }
        Overlays::new(memory)
    }

    fn read(o: &Overlays, gpa: u64) -> [u8; PAGE] {
        let mut page = [0; PAGE];
        o.memory.read_slice(&mut page, GuestAddress(gpa)).unwrap();
        page
    }

    const A: u64 = 0x2000;
    const B: u64 = 0x3000;

    #[test]
    fn ram_shows_again_when_the_overlay_moves_or_goes() {
        let clock = ReferenceClock::starting_at(2_445_430_000, 0).unwrap();
        let mut o = overlays();
        o.shift(Kind::ReferenceTsc, None, Some(A), &clock);
        let first = DecodedPage::from_bytes(&read(&o, A));
        assert_eq!((first.scale, first.offset), (clock.scale(), clock.offset()));
        assert_ne!(first.sequence, 0);
        o.shift(Kind::ReferenceTsc, Some(A), Some(B), &clock);
        assert_eq!(read(&o, A), [2; PAGE]);
        o.republish(&clock);
        assert_ne!(DecodedPage::from_bytes(&read(&o, B)).sequence, first.sequence);
        o.invalidate();
        o.republish(&clock.stopped(1000));
        assert_eq!(DecodedPage::from_bytes(&read(&o, B)).sequence, 0, "shows no standing clock");
        o.shift(Kind::ReferenceTsc, Some(B), None, &clock);
        assert_eq!(read(&o, B), [3; PAGE]);
        assert!(o.covered.is_empty());
    }

    #[test]
    fn two_overlays_share_a_page() {
        let clock = ReferenceClock::starting_at(2_445_430_000, 0).unwrap();
        let mut o = overlays();
        o.shift(Kind::Hypercall, None, Some(A), &clock);
        o.shift(Kind::ReferenceTsc, None, Some(A), &clock);
        assert_eq!(DecodedPage::from_bytes(&read(&o, A)).scale, clock.scale());
        o.shift(Kind::ReferenceTsc, Some(A), None, &clock);
        assert_eq!(&read(&o, A)[..HYPERCALL_PAGE.len()], &HYPERCALL_PAGE);
        o.shift(Kind::Hypercall, Some(A), None, &clock);
        assert_eq!(read(&o, A), [2; PAGE]);
    }
}
