//! Brings a kernel into guest memory, told apart by content, never by name.

mod bzimage;
mod elf;
mod multiboot;
mod payload;

use crate::error::{Error, Result};
use crate::layout::{
    BOOT_INFO, BOOT_PARAMS, CMDLINE, CMDLINE_SPACE, EBDA, GDT, HIGH_MEMORY, PAGE_TABLES,
};
use crate::memory::{self, GuestMemory};
use linux_loader::loader::bootparam::setup_header;
use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::Path;
use vm_memory::{Bytes, GuestAddress, ReadVolatile};

/// A kernel in guest memory, and what it asks of whoever starts it.
#[derive(Debug)]
pub struct Kernel {
    /// Guest-physical address of the first instruction.
    pub entry: u64,
    /// How it is entered and told of the machine.
    pub protocol: Protocol,
    /// Memory that the kernel uses before it reads the memory map.
    pub occupies: Range<u64>,
    /// Highest address that the last byte of an initrd may have.
    pub initrd_max: u64,
    /// Longest command line, without the closing NUL.
    pub cmdline_max: usize,
}

impl Kernel {
    /// Whether it came as a bzImage: only there the header tells what it needs.
    pub fn is_bzimage(&self) -> bool {
        match &self.protocol {
            Protocol::Linux64(header) | Protocol::Linux32(header) => header.init_size != 0,
            Protocol::Pvh | Protocol::Multiboot => false,
        }
    }
}

/// How a kernel is entered, and what it is told there.
#[derive(Debug)]
pub enum Protocol {
    /// Linux in 64-bit mode: a zero page with this setup header (boot.rst).
    Linux64(setup_header),
    /// Linux in 32-bit protected mode: the same.
    Linux32(setup_header),
    /// Xen's PVH: 32-bit protected mode and `hvm_start_info`.
    Pvh,
    /// Multiboot 0.6.96: 32-bit protected mode and its information structure.
    Multiboot,
}

impl Protocol {
    /// Memory that we write ourselves before the guest starts.
    fn tables(&self) -> Vec<Range<u64>> {
        let mut tables = vec![GDT..GDT + 32, CMDLINE..CMDLINE + CMDLINE_SPACE, EBDA..HIGH_MEMORY];
        match self {
            Protocol::Linux64(_) => {
                tables
                    .extend([BOOT_PARAMS..BOOT_PARAMS + 0x1000, PAGE_TABLES..PAGE_TABLES + 0x6000]);
            }
            Protocol::Linux32(_) => tables.push(BOOT_PARAMS..BOOT_PARAMS + 0x1000),
            Protocol::Pvh | Protocol::Multiboot => tables.push(BOOT_INFO..BOOT_INFO + 0x1000),
        }
        tables
    }
}

/// Who unpacks a bzImage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Boot {
    /// This program: the kernel starts at the address that it was linked for.
    Payload,
    /// The guest, by the code in the bzImage; needed for KASLR.
    Setup,
    /// `payload` where we know its format, else `setup`.
    Auto,
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

/// Loads the kernel at `path`; `boot` matters for a bzImage.
///
/// # Errors
/// One line that names the file, what it holds and what is accepted.
pub fn load_kernel(memory: &GuestMemory, path: &Path, boot: Boot) -> Result<Kernel> {
    let (mut file, length) = open("--kernel", path)?;
    let named =
        |what: &dyn std::fmt::Display| Error::new(format!("--kernel {}: {what}", path.display()));
    let mut head = Vec::with_capacity(multiboot::SEARCHED);
    file.by_ref().take(multiboot::SEARCHED as u64).read_to_end(&mut head).map_err(|e| named(&e))?;
    let loaded = match Image::of(&head) {
        Image::Bz => bzimage::load(memory, &mut file, length, &head, boot),
        Image::Elf => elf::load(memory, &mut file, length, &head),
        Image::Unknown(found) => Err(format!(
            "{found}; accepted are a Linux bzImage for x86, an ELF kernel for x86-64, and an ELF \
             kernel for i386 with a Multiboot header or a PVH note"
        )),
    };
    loaded.map_err(|what| named(&what))
}

/// What the first bytes of a file say it is.
#[derive(Debug, PartialEq, Eq)]
enum Image {
    Bz,
    Elf,
    Unknown(&'static str),
}

impl Image {
    fn of(head: &[u8]) -> Self {
        let at =
            |offset: usize, magic: &[u8]| head.get(offset..offset + magic.len()) == Some(magic);
        if at(0, b"\x7fELF") {
            // Class, byte order, and the low byte of the machine (ELF-64 §4).
            return match (head.get(4), head.get(5), head.get(18)) {
                (Some(2), Some(1), Some(62)) | (Some(1), Some(1), Some(3)) => Image::Elf,
                (Some(2), Some(1), Some(183)) => Image::Unknown("is an ELF file for arm64"),
                (_, _, None) => Image::Unknown("is too short to be a kernel"),
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
        if multiboot::find_header(head).is_some() {
            return Image::Unknown("is a Multiboot image that is not ELF");
        }
        if payload::Format::of(head).is_some() {
            return Image::Unknown("is a compressed file");
        }
        if head.len() < 0x260 {
            return Image::Unknown("is too short to be a kernel");
        }
        Image::Unknown("is not a kernel that is known here")
    }
}

/// Places the initrd at `path` as high as the kernel allows, clear of the
/// kernel itself, and returns its address and size.
///
/// # Errors
/// One line when it does not fit.
pub fn load_initrd(memory: &GuestMemory, kernel: &Kernel, path: &Path) -> Result<(u64, u64)> {
    let (mut file, length) = open("--initrd", path)?;
    place_module(memory, kernel, &mut file, length)
        .map_err(|what| Error::new(format!("--initrd {}: {what}", path.display())))
}

/// Gives a unit test its environment: vCPUs, MiB of memory, and that there is a
/// test device; one `NAME=VALUE` a line, as such tests read their one module.
///
/// # Errors
/// One line when it does not fit.
pub fn load_environment(
    memory: &GuestMemory,
    kernel: &Kernel,
    cpus: u32,
    memory_bytes: u64,
) -> Result<(u64, u64)> {
    let text =
        format!("NR_CPUS={cpus}\nMEMSIZE={}\nTEST_DEVICE=1\nBOOTLOADER=0\n", memory_bytes >> 20);
    place_module(memory, kernel, &mut text.as_bytes(), text.len() as u64)
        .map_err(|what| Error::new(format!("--debug-exit: the environment: {what}")))
}

fn place_module(
    memory: &GuestMemory,
    kernel: &Kernel,
    source: &mut impl ReadVolatile,
    length: u64,
) -> std::result::Result<(u64, u64), String> {
    let start = place_initrd(kernel, memory::low_end(memory), length).ok_or_else(|| {
        format!(
            "its {} MiB do not fit beside the kernel, which wants memory up to {} MiB; give more \
             --memory or a smaller file",
            length.div_ceil(1 << 20),
            kernel.occupies.end.div_ceil(1 << 20)
        )
    })?;
    let size = usize::try_from(length).map_err(|e| e.to_string())?;
    memory
        .read_exact_volatile_from(GuestAddress(start), source, size)
        .map_err(|e| e.to_string())?;
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

/// The command line of the kernel at `path`: what was given, or what its kind
/// gets where nothing is. A Multiboot kernel finds its own name first.
///
/// # Errors
/// A line that is too long, or holds a NUL, is refused, never cut.
pub fn cmdline(kernel: &Kernel, path: &Path, given: Option<&str>) -> Result<String> {
    let line = match kernel.protocol {
        Protocol::Multiboot => {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            [name.as_ref(), given.unwrap_or("")].join(" ").trim_end().to_owned()
        }
        _ => given.unwrap_or("console=ttyS0").to_owned(),
    };
    let max = kernel.cmdline_max.min(CMDLINE_SPACE as usize - 1);
    if line.len() > max {
        return Err(Error::new(format!(
            "--cmdline: {} bytes, and this kernel takes {max} at most",
            line.len()
        )));
    }
    if line.contains('\0') {
        return Err(Error::new("--cmdline: holds a NUL character"));
    }
    Ok(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel(occupies: Range<u64>, initrd_max: u64) -> Kernel {
        Kernel { entry: 0, protocol: Protocol::Pvh, occupies, initrd_max, cmdline_max: 255 }
    }

    #[test]
    fn images_are_told_apart_by_content() {
        assert!(matches!(Image::of(b""), Image::Unknown(_)));
        assert!(matches!(Image::of(&[0; 600]), Image::Unknown("is too short to be a kernel")));
        let mut arm = vec![0; 4096];
        arm[56..60].copy_from_slice(b"ARM\x64");
        assert_eq!(Image::of(&arm), Image::Unknown("is a Linux Image for arm64"));
        let mut elf = vec![0; 4096];
        elf[..6].copy_from_slice(b"\x7fELF\x01\x01");
        elf[18] = 3;
        assert_eq!(Image::of(&elf), Image::Elf);
        elf[18] = 62;
        assert_eq!(Image::of(&elf), Image::Unknown("is an ELF file for another machine"));
        elf[4] = 2;
        assert_eq!(Image::of(&elf), Image::Elf);
        assert_eq!(Image::of(&elf[..18]), Image::Unknown("is too short to be a kernel"));
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
        let of = |line: &str| cmdline(&k, Path::new("a/b.flat"), Some(line));
        assert_eq!(of(&"x".repeat(255)).unwrap().len(), 255);
        assert!(of(&"x".repeat(256)).is_err());
        assert!(of("a\0b").is_err());
    }

    #[test]
    fn a_multiboot_kernel_finds_its_name_and_linux_a_console() {
        let mut k = kernel(0..0, 0);
        let path = Path::new("a/b.flat");
        assert_eq!(cmdline(&k, path, None).unwrap(), "console=ttyS0");
        k.protocol = Protocol::Multiboot;
        assert_eq!(cmdline(&k, path, None).unwrap(), "b.flat");
        assert_eq!(cmdline(&k, path, Some("rdtsc inl")).unwrap(), "b.flat rdtsc inl");
    }
}
