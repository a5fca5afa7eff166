//! The header of Multiboot 0.6.96 §3.1, by which hypervisor unit tests are known.

/// The header lies in this much of the file, at a multiple of 4.
pub(super) const SEARCHED: usize = 8192;
const MAGIC: u32 = 0x1bad_b002;
/// Modules on page boundaries: they are.
const PAGE_ALIGN: u32 = 1;
/// Memory information: given to all.
const MEMORY_INFO: u32 = 1 << 1;
/// Bits that a loader must understand or refuse.
const MANDATORY: u32 = 0xffff;

/// The header's flags, if there is one with a true checksum.
pub(super) fn find_header(head: &[u8]) -> Option<u32> {
    let head = &head[..head.len().min(SEARCHED)];
    head.chunks_exact(4).enumerate().find_map(|(i, word)| {
        let magic = u32::from_le_bytes(word.try_into().ok()?);
        let field = |n: usize| {
            let at = 4 * (i + n);
            Some(u32::from_le_bytes(head.get(at..at + 4)?.try_into().ok()?))
        };
        let (flags, checksum) = (field(1)?, field(2)?);
        let sum = magic.wrapping_add(flags).wrapping_add(checksum);
        (magic == MAGIC && sum == 0).then_some(flags)
    })
}

/// Refuses what the header must have and this machine cannot give.
pub(super) fn check_flags(flags: u32) -> Result<(), String> {
    match flags & MANDATORY & !(PAGE_ALIGN | MEMORY_INFO) {
        0 => Ok(()),
        wants => Err(format!(
            "has a Multiboot header that asks for features {wants:#x}; accepted are page-aligned \
             modules and memory information (bits 0 and 1)"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(flags: u32) -> Vec<u8> {
        let checksum = 0u32.wrapping_sub(MAGIC).wrapping_sub(flags);
        [MAGIC, flags, checksum].iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    #[test]
    fn the_header_is_found_where_it_may_be_and_nowhere_else() {
        let at = |offset: usize| {
            let mut file = vec![0; offset];
            file.extend(header(3));
            file.resize(file.len().max(100), 0);
            find_header(&file)
        };
        assert_eq!(at(0), Some(3));
        assert_eq!(at(SEARCHED - 12), Some(3));
        assert_eq!(at(SEARCHED - 8), None);
        assert_eq!(at(6), None);
        let mut wrong = header(3);
        wrong[8] ^= 1;
        assert_eq!(find_header(&wrong), None);
        assert_eq!(find_header(&wrong[..7]), None);
    }

    #[test]
    fn what_cannot_be_given_is_refused() {
        assert!(check_flags(3).is_ok());
        assert!(check_flags(1 << 16).is_ok());
        assert!(check_flags(1 << 2).unwrap_err().contains("0x4"));
    }
}
