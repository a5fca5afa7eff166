//! The command line: words of the form `key=value`.

/// Offset of `cmd_line_ptr` in the zero page (Linux x86 boot protocol).
const CMD_LINE_PTR: usize = 0x228;
const MAX: usize = 2048;

/// A copy of the command line, and where it was found.
#[derive(Debug)]
pub struct Args {
    zero_page: &'static [u8; 4096],
    bytes: [u8; MAX],
    length: usize,
}

impl Args {
    /// Copies the command line out of low memory.
    ///
    /// # Safety
    /// `zero_page` must be the zero page that the VMM passed.
    pub(crate) unsafe fn from_zero_page(zero_page: *const u8) -> Self {
        // SAFETY: the zero page is a page, and nothing here writes to it.
        let page = unsafe { &*zero_page.cast() };
        let mut args = Self { zero_page: page, bytes: [0; MAX], length: 0 };
        // SAFETY: the zero page holds a 32-bit physical address, identity-mapped.
        let line = unsafe { zero_page.add(CMD_LINE_PTR).cast::<u32>().read_unaligned() };
        if line == 0 {
            return args;
        }
        while args.length < MAX {
            // SAFETY: within the NUL-terminated line that the VMM loaded.
            let byte = unsafe { (line as usize as *const u8).add(args.length).read() };
            if byte == 0 {
                break;
            }
            args.bytes[args.length] = byte;
            args.length += 1;
        }
        args
    }

    /// The zero page of the boot protocol.
    pub fn zero_page(&self) -> &'static [u8; 4096] {
        self.zero_page
    }

    /// The value of the last `key=value`.
    pub fn text(&self, key: &str) -> Option<&str> {
        let line = core::str::from_utf8(&self.bytes[..self.length]).ok()?;
        line.split_ascii_whitespace()
            .filter_map(|word| word.split_once('='))
            .filter(|(name, _)| *name == key)
            .map(|(_, value)| value)
            .next_back()
    }

    /// The value of `key=number`, or `default`. A word that is no number stops the guest: a
    /// measurement with another parameter than the one asked for would be a lie.
    pub fn number(&self, key: &str, default: u64) -> u64 {
        match self.text(key) {
            None => default,
            Some(text) => match text.parse() {
                Ok(number) => number,
                Err(_) => panic!("{key}={text}: not a number"),
            },
        }
    }
}
