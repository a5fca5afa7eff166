//! Is it one clock? Comparisons of reads whose order is known.

use crate::clocks::{self, PAGE};
use crate::console::ResultLine;

/// Violations of page₁ ≤ MSR ≤ page₂ for reads in that order on one vCPU.
#[derive(Debug, Default, Clone, Copy)]
pub struct PageAndMsr {
    /// Triples read.
    pub pairs: u64,
    /// The MSR was behind the page read before it.
    pub msr_behind: u64,
    /// The page was behind the MSR read before it.
    pub page_behind: u64,
    /// Triples without a verdict: the page was not valid, or there is no MSR.
    pub invalid: u64,
}

impl PageAndMsr {
    /// Reads `pairs` triples.
    pub fn check(pairs: u64) -> Self {
        let mut result = Self { pairs, ..Self::default() };
        for _ in 0..pairs {
            let (Some(first), Some(msr), Some(second)) = (PAGE.read(), clocks::msr(), PAGE.read())
            else {
                result.invalid += 1;
                continue;
            };
            result.msr_behind += u64::from(msr < first);
            result.page_behind += u64::from(second < msr);
        }
        result
    }

    /// Prints the counts; `when` says after what.
    pub fn report(self, guest: &str, when: &str) {
        ResultLine::new(guest)
            .text("check", "page<=msr<=page")
            .text("when", when)
            .number("pairs", self.pairs)
            .number("msr_behind", self.msr_behind)
            .number("page_behind", self.page_behind)
            .number("invalid", self.invalid)
            .end();
    }
}
