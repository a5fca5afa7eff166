//! A bzImage, by the boot protocol of Documentation/arch/x86/boot.rst: either
//! its own code unpacks the kernel in the guest, or we do.
//!
//! linux-loader copies the protected-mode part; the header's promises are
//! checked here, because that crate looks at the magic, version and
//! LOADED_HIGH alone.

use super::{Boot, Kernel, Protocol, elf, payload};
use crate::layout::HIGH_MEMORY;
use crate::memory::{self, GuestMemory};
use linux_loader::loader::bootparam::{XLF_KERNEL_64, setup_header};
use linux_loader::loader::{BzImage, KernelLoader};
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use vm_memory::{ByteValued, Bytes, GuestAddress};

/// Offset of the setup header in the file.
const HEADER: usize = 0x1f1;
/// First protocol version with `pref_address` and `init_size`.
const VERSION_2_10: u16 = 0x020a;
const LOADED_HIGH: u8 = 1;
/// Distance of the 64-bit entry from the start of the protected-mode part; the
/// 32-bit entry is the start itself.
const ENTRY_64: u64 = 0x200;

pub(super) fn load(
    memory: &GuestMemory,
    file: &mut File,
    length: u64,
    head: &[u8],
    boot: Boot,
) -> Result<Kernel, String> {
    let header = parse(head, length)?;
    if boot == Boot::Setup {
        return load_setup(memory, file, header);
    }
    let (magic, size) = payload_ends(file, &header)?;
    match payload::Format::of(&magic) {
        Some(format) => load_payload(memory, file, header, format, size),
        None if boot == Boot::Auto => {
            log::info!("the payload's format is not known here: the guest unpacks it itself");
            load_setup(memory, file, header)
        }
        None => Err("has a payload of a format that is not known here; use --boot setup".into()),
    }
}

fn is_64(header: &setup_header) -> bool {
    header.xloadflags & XLF_KERNEL_64 != 0
}

/// The whole image: its own code unpacks the kernel.
fn load_setup(
    memory: &GuestMemory,
    file: &mut File,
    header: setup_header,
) -> Result<Kernel, String> {
    let start = place(&header, memory::low_end(memory))?;
    BzImage::load(memory, Some(GuestAddress(start)), file, Some(GuestAddress(HIGH_MEMORY)))
        .map_err(|e| format!("cannot be loaded ({e})"))?;
    let occupies = start..start + u64::from(header.init_size);
    Ok(if is_64(&header) {
        kernel(start + ENTRY_64, Protocol::Linux64(header), occupies)
    } else {
        kernel(start, Protocol::Linux32(header), occupies)
    })
}

/// The kernel alone, where it was linked to run.
fn load_payload(
    memory: &GuestMemory,
    file: &mut File,
    header: setup_header,
    format: payload::Format,
    size: u64,
) -> Result<Kernel, String> {
    let init_size = u64::from(header.init_size);
    payload::check_size(size, init_size, memory::low_end(memory))?;
    // gzip has the size as a part of its own.
    let own = if format == payload::Format::Gzip { 0 } else { 4 };
    let length = u64::from(header.payload_length) - own;
    file.seek(SeekFrom::Start(payload_start(&header))).map_err(|e| e.to_string())?;
    let packed = BufReader::with_capacity(64 << 10, file.take(length));
    let mut unpacked = payload::Unpacked::open(format, packed, size)?;

    let named = |e: String| format!("has a payload that {e}");
    let image = elf::parse_head(unpacked.head(), size).map_err(named)?;
    if image.long != is_64(&header) {
        return Err("has a damaged header: its payload is for the other word size".into());
    }
    let entry = image.check_entry(image.entry).map_err(named)?;
    let protocol = if image.long { Protocol::Linux64(header) } else { Protocol::Linux32(header) };
    let segments = image.place(memory, &protocol).map_err(named)?;
    for segment in image.in_file_order() {
        unpacked.copy(segment.offset, segment.filled, |at, piece| {
            let to = GuestAddress(segment.memory.start + at);
            memory.write_slice(piece, to).map_err(|e| e.to_string())
        })?;
    }
    unpacked.finish()?;
    log::info!(
        "unpacked the {format:?} payload: {size} bytes, entered at {entry:#x} where it was \
         linked to run (KASLR needs --boot setup)"
    );
    let end = segments.end.max(segments.start.saturating_add(init_size));
    Ok(kernel(entry, protocol, segments.start..end))
}

fn kernel(entry: u64, protocol: Protocol, occupies: std::ops::Range<u64>) -> Kernel {
    let (initrd_max, cmdline_max) = match &protocol {
        Protocol::Linux64(h) | Protocol::Linux32(h) => {
            (u64::from(h.initrd_addr_max), h.cmdline_size as usize)
        }
        Protocol::Pvh | Protocol::Multiboot => (0, 0),
    };
    Kernel { entry, protocol, occupies, initrd_max, cmdline_max }
}

/// First and last four bytes of the payload; the last are its unpacked size.
fn payload_ends(file: &mut File, header: &setup_header) -> Result<([u8; 4], u64), String> {
    let (offset, length) = (u64::from(header.payload_offset), u64::from(header.payload_length));
    if length < 8 || offset + length > u64::from(header.syssize) * 16 {
        return Err("has a damaged header: its payload ends beyond the image".into());
    }
    let start = payload_start(header);
    let mut four = |at| {
        let mut bytes = [0; 4];
        file.seek(SeekFrom::Start(at)).and_then(|_| file.read_exact(&mut bytes))?;
        Ok::<_, std::io::Error>(bytes)
    };
    let failed = |e: std::io::Error| e.to_string();
    let (magic, size) = (four(start).map_err(failed)?, four(start + length - 4).map_err(failed)?);
    Ok((magic, u32::from_le_bytes(size).into()))
}

fn payload_start(header: &setup_header) -> u64 {
    setup_bytes(header) + u64::from(header.payload_offset)
}

/// Bytes before the protected-mode part. `setup_sects` 0 means 4, for the sake
/// of very old kernels.
fn setup_bytes(header: &setup_header) -> u64 {
    let sectors = if header.setup_sects == 0 { 4 } else { u64::from(header.setup_sects) };
    (sectors + 1) * 512
}

/// Reads the setup header and checks it against the file.
fn parse(head: &[u8], length: u64) -> Result<setup_header, String> {
    let size = size_of::<setup_header>();
    let bytes = head.get(HEADER..HEADER + size).ok_or("is cut short inside its setup header")?;
    let mut header = setup_header::default();
    header.as_mut_slice().copy_from_slice(bytes);
    let version = header.version;
    if header.loadflags & LOADED_HIGH == 0 {
        return Err("is a zImage, which loads low; give a bzImage".into());
    }
    if version < VERSION_2_10 {
        return Err(format!(
            "speaks boot protocol {}.{:02}, and 2.10 is the least that is accepted",
            version >> 8,
            version & 0xff
        ));
    }
    let needs = setup_bytes(&header) + u64::from(header.syssize) * 16;
    if length < needs {
        return Err(format!("is cut short: {length} bytes, and its header tells of {needs}"));
    }
    if header.init_size == 0 || u64::from(header.init_size) < u64::from(header.syssize) * 16 {
        return Err("has a damaged header: init_size is smaller than the image".into());
    }
    Ok(header)
}

/// Where the kernel goes: where it prefers to run, so that it need not move.
fn place(header: &setup_header, low_end: u64) -> Result<u64, String> {
    let preferred = header.pref_address;
    let start = if header.relocatable_kernel == 0 {
        preferred
    } else {
        let alignment = u64::from(header.kernel_alignment).max(1);
        if !alignment.is_power_of_two() {
            return Err("has a damaged header: kernel_alignment is no power of two".into());
        }
        let fits =
            |at: &u64| at.checked_add(u64::from(header.init_size)).is_some_and(|e| e <= low_end);
        let lowest = HIGH_MEMORY.next_multiple_of(alignment);
        Some(preferred).filter(|at| *at >= HIGH_MEMORY).filter(fits).unwrap_or(lowest)
    };
    if start < HIGH_MEMORY {
        return Err(format!("has a damaged header: it wants to run at {start:#x}"));
    }
    match start.checked_add(u64::from(header.init_size)) {
        Some(end) if end <= low_end => Ok(start),
        Some(end) => Err(format!(
            "needs memory up to {} MiB to unpack itself; give more --memory",
            end.div_ceil(1 << 20)
        )),
        None => Err("has a damaged header: pref_address is beyond memory".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A header like Debian's, in a file of exactly the length it tells of.
    fn good() -> (setup_header, u64) {
        let header = setup_header {
            setup_sects: 31,
            syssize: 1000,
            header: 0x5372_6448,
            version: 0x020f,
            loadflags: LOADED_HIGH,
            xloadflags: XLF_KERNEL_64,
            cmdline_size: 2047,
            initrd_addr_max: 0x7fff_ffff,
            relocatable_kernel: 1,
            kernel_alignment: 0x20_0000,
            pref_address: 0x100_0000,
            init_size: 0x300_0000,
            ..Default::default()
        };
        (header, 32 * 512 + 16000)
    }

    fn image(header: &setup_header) -> Vec<u8> {
        let mut bytes = vec![0; 4096];
        bytes[HEADER..HEADER + size_of::<setup_header>()].copy_from_slice(header.as_slice());
        bytes
    }

    #[test]
    fn a_good_header_is_taken() {
        let (header, length) = good();
        assert!(parse(&image(&header), length).is_ok());
    }

    #[test]
    fn setup_sects_zero_means_four() {
        let (mut header, _) = good();
        header.setup_sects = 0;
        assert!(parse(&image(&header), 5 * 512 + 16000).is_ok());
        assert!(parse(&image(&header), 5 * 512 + 15999).is_err());
    }

    #[test]
    fn what_the_header_promises_is_checked() {
        let (header, length) = good();
        assert!(parse(&image(&header), length - 1).unwrap_err().contains("cut short"));
        assert!(parse(&image(&header)[..600], length).unwrap_err().contains("cut short"));
        let damaged = |change: fn(&mut setup_header)| {
            let mut header = header;
            change(&mut header);
            parse(&image(&header), length).unwrap_err()
        };
        assert!(damaged(|h| h.loadflags = 0).contains("zImage"));
        assert!(damaged(|h| h.version = 0x0206).contains("2.06"));
        assert!(damaged(|h| h.init_size = 0).contains("init_size"));
    }

    #[test]
    fn the_kernel_runs_where_it_prefers_if_memory_allows() {
        let (mut header, _) = good();
        assert_eq!(place(&header, 128 << 20), Ok(16 << 20));
        assert_eq!(place(&header, 60 << 20), Ok(2 << 20));
        assert!(place(&header, 40 << 20).unwrap_err().contains("--memory"));
        header.pref_address = u64::MAX;
        assert_eq!(place(&header, 128 << 20), Ok(2 << 20));
        header.relocatable_kernel = 0;
        assert!(place(&header, 128 << 20).is_err());
        header.pref_address = 0;
        assert!(place(&header, 128 << 20).is_err());
    }
}
