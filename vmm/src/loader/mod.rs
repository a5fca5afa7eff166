//! Brings a kernel into guest memory, told apart by content, never by name.

mod bzimage;
mod elf;

use crate::error::{Error, Result};
use crate::layout::{CMDLINE_SPACE, HIGH_MEMORY};
use crate::memory::{self, GuestMemory};
use linux_loader::loader::bootparam::setup_header;
use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::Path;
use vm_memory::{Bytes, GuestAddress, ReadVolatile};

/// A kernel in guest memory, and what its header asks of whoever starts it.
#[derive(Debug)]
pub struct Kernel {
    /// Guest-physical address of the first instruction, in 64-bit mode.
    pub entry: u64,
    /// The kernel's own setup header, or one made for images without.
    pub header: setup_header,
    /// Memory that the kernel uses before it reads the memory map.
    pub occupies: Range<u64>,
    /// Highest address that the last byte of an initrd may have.
    pub initrd_max: u64,
    /// Longest command line, without the closing NUL.
    pub cmdline_max: usize,
}

/// Opens a regular file and returns it with its length.
fn open(flag: &str, path: &Path) -> Result<(File, u64)> {
    let shown = path.display();
    let file = File::open(path).map_err(|e| Error::new(format!("{flag} {shown}: {e}")))?;
    let metadata = file.metadata().map_err(|e| Error::new(format!("{flag} {shown}: {e}")))?;
    if metadata.is_dir() {
        return Err(Error::new(format!("{flag} {shown}: is a directory, give a file")));
    }
    if !metadata.is_file() {
        return Err(Error::new(format!("{flag} {shown}: is not a regular file")));
    }
    if metadata.len() == 0 {
        return Err(Error::new(format!("{flag} {shown}: is empty")));
    }
    Ok((file, metadata.len()))
}

/// Loads the kernel at `path`.
///
/// # Errors
/// One line that names the file, what it holds and what is accepted.
pub fn load_kernel(memory: &GuestMemory, path: &Path) -> Result<Kernel> {
    let (mut file, length) = open("--kernel", path)?;
    let mut head = Vec::with_capacity(4096);
    file.by_ref()
        .take(4096)
        .read_to_end(&mut head)
        .map_err(|e| Error::new(format!("--kernel {}: {e}", path.display())))?;
    let loaded = match Image::of(&head) {
        Image::Bz => bzimage::load(memory, &mut file, length, &head),
        Image::Elf64 => elf::load(memory, &mut file),
        Image::Unknown(found) => Err(format!(
            "{found}; accepted are a Linux bzImage (x86-64) and a 64-bit x86 ELF kernel"
        )),
    };
    loaded.map_err(|what| Error::new(format!("--kernel {}: {what}", path.display())))
}

/// What the first bytes of a file say it is.
#[derive(Debug, PartialEq, Eq)]
enum Image {
    Bz,
    Elf64,
    Unknown(&'static str),
}

impl Image {
    fn of(head: &[u8]) -> Self {
        let at =
            |offset: usize, magic: &[u8]| head.get(offset..offset + magic.len()) == Some(magic);
        if at(0, b"\x7fELF") {
            return match (head.get(4), head.get(18)) {
                (Some(2), Some(62)) => Image::Elf64,
                (Some(2), Some(183)) => Image::Unknown("is an ELF file for arm64"),
                (Some(2), _) => Image::Unknown("is an ELF file for another machine"),
                (Some(1), Some(3)) => Image::Unknown("is a 32-bit x86 ELF file"),
                _ => Image::Unknown("is an ELF file for another machine"),
            };
        }
        // arch/arm64 boot protocol: the magic stands at offset 56.
        if at(56, b"ARM\x64") {
            return Image::Unknown("is a Linux Image for arm64");
        }
        // x86 boot protocol: `HdrS` at 0x202.
        if at(0x202, b"HdrS") {
            return Image::Bz;
        }
        if head.len() < 0x260 {
            return Image::Unknown("is too short to be a kernel");
        }
        Image::Unknown("is not a kernel that is known here")
    }
}

/// Places the initrd as high as the kernel allows, clear of the kernel itself,
/// and returns its address and size.
///
/// # Errors
/// One line when it does not fit.
pub fn load_initrd(memory: &GuestMemory, kernel: &Kernel, path: &Path) -> Result<(u64, u64)> {
    let (mut file, length) = open("--initrd", path)?;
    let shown = path.display();
    let start = place_initrd(kernel, memory::low_end(memory), length).ok_or_else(|| {
        Error::new(format!(
            "--initrd {shown}: its {} MiB do not fit beside the kernel, which wants memory up to \
             {} MiB; give more --memory or a smaller initrd",
            length.div_ceil(1 << 20),
            kernel.occupies.end.div_ceil(1 << 20)
        ))
    })?;
    read_into(memory, start, &mut file, length)
        .map_err(|e| Error::new(format!("--initrd {shown}: {e}")))?;
    Ok((start, length))
}

fn place_initrd(kernel: &Kernel, low_end: u64, length: u64) -> Option<u64> {
    let ceiling = low_end.min(kernel.initrd_max.saturating_add(1));
    let start = ceiling.checked_sub(length)? & !0xfff;
    if start >= kernel.occupies.end {
        return Some(start);
    }
    // Below the kernel, if that leaves high memory alone.
    let below = kernel.occupies.start.min(ceiling).checked_sub(length)? & !0xfff;
    (below >= HIGH_MEMORY).then_some(below)
}

fn read_into(
    memory: &GuestMemory,
    start: u64,
    file: &mut impl ReadVolatile,
    length: u64,
) -> std::result::Result<(), String> {
    let length = usize::try_from(length).map_err(|e| e.to_string())?;
    memory.read_exact_volatile_from(GuestAddress(start), file, length).map_err(|e| e.to_string())
}

/// Checks that the command line fits the kernel and our buffer.
///
/// # Errors
/// A line that is too long, or holds a NUL, is refused, never cut.
pub fn check_cmdline(kernel: &Kernel, cmdline: &str) -> Result<()> {
    let max = kernel.cmdline_max.min(CMDLINE_SPACE as usize - 1);
    if cmdline.len() > max {
        return Err(Error::new(format!(
            "--cmdline: {} bytes, and this kernel takes {max} at most",
            cmdline.len()
        )));
    }
    if cmdline.contains('\0') {
        return Err(Error::new("--cmdline: holds a NUL character"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel(occupies: Range<u64>, initrd_max: u64) -> Kernel {
        Kernel { entry: 0, header: Default::default(), occupies, initrd_max, cmdline_max: 255 }
    }

    #[test]
    fn images_are_told_apart_by_content() {
        assert!(matches!(Image::of(b""), Image::Unknown(_)));
        assert!(matches!(Image::of(&[0; 600]), Image::Unknown("is too short to be a kernel")));
        let mut arm = vec![0; 4096];
        arm[56..60].copy_from_slice(b"ARM\x64");
        assert_eq!(Image::of(&arm), Image::Unknown("is a Linux Image for arm64"));
        let mut elf = vec![0; 4096];
        elf[..5].copy_from_slice(b"\x7fELF\x01");
        elf[18] = 3;
        assert_eq!(Image::of(&elf), Image::Unknown("is a 32-bit x86 ELF file"));
        elf[4] = 2;
        elf[18] = 62;
        assert_eq!(Image::of(&elf), Image::Elf64);
    }

    #[test]
    fn the_initrd_stays_clear_of_the_kernel_and_below_its_limit() {
        let k = kernel(16 << 20..64 << 20, 0x7fff_ffff);
        assert_eq!(place_initrd(&k, 128 << 20, 1 << 20), Some(127 << 20));
        assert_eq!(place_initrd(&k, 64 << 20, 1 << 20), Some(15 << 20));
        assert_eq!(place_initrd(&k, 64 << 20, 40 << 20), None);
        let low = kernel(1 << 20..2 << 20, (8 << 20) - 1);
        assert_eq!(place_initrd(&low, 128 << 20, 4096), Some((8 << 20) - 4096));
        assert_eq!(place_initrd(&low, 128 << 20, u64::MAX), None);
    }

    #[test]
    fn a_command_line_is_never_cut() {
        let k = kernel(0..0, 0);
        assert!(check_cmdline(&k, &"x".repeat(255)).is_ok());
        assert!(check_cmdline(&k, &"x".repeat(256)).is_err());
        assert!(check_cmdline(&k, "a\0b").is_err());
    }
}
