//! ELF images, 32- and 64-bit: a vmlinux, a unit test, a bare-metal guest.
//!
//! The headers are read by the `elf` crate, straight from the file, so that a
//! vmlinux with a gigabyte of debug information costs no more than its segments.
//! Every segment is checked before the first byte goes into guest memory.

use super::{Kernel, Protocol, multiboot};
use crate::layout::{HIGH_MEMORY, HOLE_END};
use crate::memory::{self, GuestMemory};
use elf::ElfStream;
use elf::abi::{EM_386, EM_X86_64, PT_LOAD, PT_NOTE};
use elf::endian::LittleEndian;
use elf::file::Class;
use elf::note::Note;
use linux_loader::loader::bootparam::setup_header;
use std::io::{Cursor, Read, Seek, SeekFrom};
use std::ops::Range;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, ReadVolatile};

/// Limit of Linux's own command line buffer on x86 (COMMAND_LINE_SIZE).
const CMDLINE_MAX: usize = 2047;
/// Note of type XEN_ELFNOTE_PHYS32_ENTRY: where PVH enters.
const PHYS32_ENTRY: u64 = 18;

/// What a file's headers say.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Image {
    /// Whether it is ELF64 for x86-64, else ELF32 for i386.
    pub long: bool,
    /// `e_entry`.
    pub entry: u64,
    /// Where PVH enters, if a note says so.
    pub pvh: Option<u64>,
    segments: Vec<Segment>,
}

/// A loadable segment of at least one byte.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Segment {
    /// Offset in the file.
    pub offset: u64,
    /// Bytes in the file; the rest is zero.
    pub filled: u64,
    /// Where it goes: guest-physical.
    pub memory: Range<u64>,
}

/// Reads the headers of a file of `length` bytes.
pub(super) fn parse(reader: &mut (impl Read + Seek), length: u64) -> Result<Image, String> {
    let mut file = ElfStream::<LittleEndian, _>::open_stream(reader)
        .map_err(|e| format!("is a damaged ELF file ({e})"))?;
    let header = &file.ehdr;
    let long = match (header.class, header.e_machine) {
        (Class::ELF64, EM_X86_64) => true,
        (Class::ELF32, EM_386) => false,
        _ => return Err("is an ELF file for another machine".into()),
    };
    let entry = header.e_entry;
    let headers = file.segments().clone();
    let mut segments = Vec::new();
    for (i, h) in headers.iter().enumerate().filter(|(_, h)| h.p_type == PT_LOAD && h.p_memsz > 0) {
        let end = h.p_paddr.checked_add(h.p_memsz);
        let end = end.ok_or_else(|| format!("is a damaged ELF file: segment {i} wraps around"))?;
        if h.p_filesz > h.p_memsz {
            return Err(format!(
                "is a damaged ELF file: segment {i} has {:#x} bytes for {:#x} of memory",
                h.p_filesz, h.p_memsz
            ));
        }
        if h.p_offset.checked_add(h.p_filesz).is_none_or(|end| end > length) {
            return Err(format!("is cut short: segment {i} lies beyond the end of the file"));
        }
        let (offset, filled) = (h.p_offset, h.p_filesz);
        segments.push(Segment { offset, filled, memory: h.p_paddr..end });
    }
    if segments.is_empty() {
        return Err("is an ELF file without a segment to load".into());
    }
    segments.sort_by_key(|s| s.memory.start);
    for pair in segments.windows(2) {
        if pair[0].memory.end > pair[1].memory.start {
            return Err(format!(
                "is a damaged ELF file: two segments claim memory at {:#x}",
                pair[1].memory.start
            ));
        }
    }
    let mut pvh = None;
    for note in headers.iter().filter(|h| h.p_type == PT_NOTE) {
        // Notes that cannot be read are none: they only ever add a way in.
        let Ok(notes) = file.segment_data_as_notes(note) else { continue };
        pvh = pvh.or(notes.filter_map(phys32_entry).next());
    }
    Ok(Image { long, entry, pvh, segments })
}

fn phys32_entry(note: Note<'_>) -> Option<u64> {
    let Note::Unknown(note) = note else { return None };
    if note.n_type != PHYS32_ENTRY || !matches!(note.name_str(), Ok("Xen")) {
        return None;
    }
    match note.desc.len() {
        4 => Some(u32::from_le_bytes(note.desc.try_into().ok()?).into()),
        8 => Some(u64::from_le_bytes(note.desc.try_into().ok()?)),
        _ => None,
    }
}

impl Image {
    /// Checks that all of it lies in memory that is free for it; returns what it
    /// will occupy.
    pub(super) fn place(
        &self,
        memory: &GuestMemory,
        protocol: &Protocol,
    ) -> Result<Range<u64>, String> {
        let tables = protocol.tables();
        for Segment { memory: m, .. } in &self.segments {
            let size = usize::try_from(m.end - m.start).map_err(|e| e.to_string())?;
            if !memory.check_range(GuestAddress(m.start), size) {
                return Err(format!(
                    "wants memory from {:#x} to {:#x}, which this guest lacks; give more --memory",
                    m.start, m.end
                ));
            }
            if let Some(table) = tables.iter().find(|t| t.start < m.end && m.start < t.end) {
                return Err(format!(
                    "wants memory from {:#x} to {:#x}, and the boot tables are at {:#x}",
                    m.start, m.end, table.start
                ));
            }
        }
        let first = self.segments.first().map_or(HIGH_MEMORY, |s| s.memory.start);
        let last = self.segments.last().map_or(HIGH_MEMORY, |s| s.memory.end);
        Ok(first..last)
    }

    /// The segments in the order of the file.
    pub(super) fn in_file_order(&self) -> Vec<&Segment> {
        let mut segments: Vec<_> = self.segments.iter().collect();
        segments.sort_by_key(|segment| segment.offset);
        segments
    }

    /// An entry point that lies in what is loaded, and where the boot vCPU can
    /// reach it: neither 32-bit mode nor our page tables go beyond 4 GiB.
    pub(super) fn check_entry(&self, entry: u64) -> Result<u64, String> {
        if entry >= HOLE_END {
            return Err(format!("enters at {entry:#x}, beyond 4 GiB"));
        }
        if self.segments.iter().any(|s| s.memory.contains(&entry)) {
            return Ok(entry);
        }
        Err(format!("enters at {entry:#x}, outside of what it loads"))
    }
}

/// Reads the headers of a file of `length` bytes that begins with `head`; of the
/// rest, sections and notes, nothing is known.
pub(super) fn parse_head(head: &[u8], length: u64) -> Result<Image, String> {
    let mut head = head.to_vec();
    // e_shoff 0: no section headers.
    let section_headers = if head.get(4) == Some(&2) { 40..48 } else { 32..36 };
    if let Some(offset) = head.get_mut(section_headers) {
        offset.fill(0);
    }
    parse(&mut Cursor::new(head), length)
}

/// Loads an ELF file of `length` bytes, by the first way in that it offers:
/// Multiboot (ELF32), PVH, Linux's 64-bit entry (ELF64).
pub(super) fn load<R>(
    memory: &GuestMemory,
    reader: &mut R,
    length: u64,
    head: &[u8],
) -> Result<Kernel, String>
where
    R: Read + Seek + ReadVolatile,
{
    let image = parse(reader, length)?;
    let (protocol, entry) = match (image.long, multiboot::find_header(head)) {
        (false, Some(flags)) => {
            multiboot::check_flags(flags)?;
            (Protocol::Multiboot, image.entry)
        }
        (long, _) => match image.pvh {
            Some(entry) => (Protocol::Pvh, entry),
            None if long => (Protocol::Linux64(made_header()), image.entry),
            None => {
                return Err("is a 32-bit x86 ELF file with neither a Multiboot header in its \
                            first 8 KiB nor a PVH note"
                    .into());
            }
        },
    };
    let entry = image.check_entry(entry)?;
    let occupies = image.place(memory, &protocol)?;
    for segment in image.in_file_order() {
        let filled = usize::try_from(segment.filled).map_err(|e| e.to_string())?;
        reader.seek(SeekFrom::Start(segment.offset)).map_err(|e| e.to_string())?;
        memory
            .read_exact_volatile_from(GuestAddress(segment.memory.start), reader, filled)
            .map_err(|e| format!("cannot be loaded ({e})"))?;
    }
    Ok(Kernel {
        entry,
        protocol,
        occupies,
        initrd_max: memory::low_end(memory).min(0x7fff_ffff),
        cmdline_max: CMDLINE_MAX,
    })
}

/// The setup header of an image that has none: just what Linux looks at.
fn made_header() -> setup_header {
    setup_header { header: 0x5372_6448, version: 0x020f, ..Default::default() }
}
