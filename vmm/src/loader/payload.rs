//! The compressed kernel in a bzImage, unpacked here so that the guest need not.
//!
//! Linux's build compresses vmlinux and, for all formats but gzip (which has it
//! anyway), appends the unpacked size as 4 bytes. That size bounds the work, and
//! the result must have it exactly.

use std::io::{BufRead, BufReader, Cursor, Read};

/// Memory for a decoder's dictionary or window, in KiB.
const DICTIONARY_KIB: u32 = 256 << 10;
/// Bytes that a decoder without a buffer of its own gives at once.
const PIECE: usize = 64 << 10;
/// Largest block of lzop, as Linux's own unpacker takes them.
const LZO_BLOCK: usize = 256 << 10;

/// How a payload is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    Gzip,
    Bzip2,
    Lzma,
    Xz,
    Lzo,
    Lz4,
    Zstd,
}

impl Format {
    /// By the magic bytes that Linux's `lib/decompress.c` goes by.
    pub(super) fn of(payload: &[u8]) -> Option<Self> {
        Some(match payload.get(..4)? {
            [0x1f, 0x8b | 0x9e, ..] => Self::Gzip,
            [b'B', b'Z', b'h', _] => Self::Bzip2,
            [0x5d, 0, ..] => Self::Lzma,
            [0xfd, b'7', b'z', b'X'] => Self::Xz,
            [0x89, b'L', b'Z', b'O'] => Self::Lzo,
            [0x02, 0x21, 0x4c, 0x18] => Self::Lz4,
            [0x28, 0xb5, 0x2f, 0xfd] => Self::Zstd,
            _ => return None,
        })
    }
}

/// Checks the size that a payload says it unpacks to: at most `init_size` bytes
/// (which covers it, by Linux's link script), and at most `limit`.
pub(super) fn check_size(size: u64, init_size: u64, limit: u64) -> Result<(), String> {
    if size > init_size {
        return Err(format!(
            "has a damaged payload ({size} bytes do not fit its init_size {init_size})"
        ));
    }
    if size > limit {
        return Err(format!(
            "unpacks to {} MiB, and the guest has {} MiB for it; give more --memory",
            size.div_ceil(1 << 20),
            limit >> 20
        ));
    }
    Ok(())
}

/// Bytes of an ELF file that hold its header and program headers.
const HEAD: u64 = 4096;

/// A payload as it comes out of its decoder, front to back: it goes into guest
/// memory piece by piece and is never here as a whole.
pub(super) struct Unpacked<'a> {
    format: Format,
    size: u64,
    /// How far it has been read.
    position: u64,
    head: Vec<u8>,
    reader: Box<dyn BufRead + 'a>,
}

impl<'a> Unpacked<'a> {
    /// Starts to unpack `packed`, without the size at its end, to `size` bytes.
    pub(super) fn open(
        format: Format,
        mut packed: impl Read + 'a,
        size: u64,
    ) -> Result<Self, String> {
        let failed = |e: &dyn std::fmt::Display| damaged(format, e);
        let mut reader: Box<dyn BufRead + 'a> = match format {
            Format::Gzip => buffered(flate2::read::GzDecoder::new(packed)),
            Format::Bzip2 => buffered(bzip2::read::BzDecoder::new(packed)),
            Format::Lzma => buffered(
                lzma_rust2::LzmaReader::new_mem_limit(packed, DICTIONARY_KIB, None)
                    .map_err(|e| failed(&e))?,
            ),
            Format::Xz => {
                buffered(lzma_rust2::XzReader::new_mem_limit(packed, false, DICTIONARY_KIB))
            }
            Format::Lzo => {
                let mut whole = Vec::new();
                packed.read_to_end(&mut whole).map_err(|e| failed(&e))?;
                Box::new(Cursor::new(unpack_lzop(&whole, size).map_err(|e| failed(&e))?))
            }
            Format::Lz4 => Box::new(lz4_flex::frame::FrameDecoder::new(packed)),
            Format::Zstd => {
                buffered(ruzstd::decoding::StreamingDecoder::new(packed).map_err(|e| failed(&e))?)
            }
        };
        let mut head = Vec::new();
        reader.by_ref().take(HEAD).read_to_end(&mut head).map_err(|e| failed(&e))?;
        let reader = Box::new(Cursor::new(head.clone()).chain(reader));
        Ok(Self { format, size, position: 0, head, reader })
    }

    /// Its first bytes.
    pub(super) fn head(&self) -> &[u8] {
        &self.head
    }

    /// Gives the bytes from `offset` to `put`, piece by piece, with the distance
    /// of each from `offset`. Offsets must not go back.
    pub(super) fn copy(
        &mut self,
        offset: u64,
        length: u64,
        mut put: impl FnMut(u64, &[u8]) -> Result<(), String>,
    ) -> Result<(), String> {
        let skip = offset.checked_sub(self.position);
        let skip = skip.ok_or("has a payload whose segments share bytes of the file")?;
        self.pieces(skip, |_, _| Ok(()))?;
        self.pieces(length, &mut put)
    }

    /// Checks that it ends where it should; only then has the decoder seen its
    /// checksum.
    pub(super) fn finish(mut self) -> Result<(), String> {
        self.pieces(self.size - self.position, |_, _| Ok(()))?;
        match self.reader.read(&mut [0]) {
            Ok(0) => Ok(()),
            Ok(_) => Err(damaged(self.format, &"it is longer than it says")),
            Err(e) => Err(damaged(self.format, &e)),
        }
    }

    fn pieces(
        &mut self,
        length: u64,
        mut put: impl FnMut(u64, &[u8]) -> Result<(), String>,
    ) -> Result<(), String> {
        let mut done = 0;
        while done < length {
            match self.reader.fill_buf() {
                Ok([]) => return Err(damaged(self.format, &"it is shorter than it says")),
                Ok(bytes) => {
                    let used =
                        bytes.len().min(usize::try_from(length - done).unwrap_or(usize::MAX));
                    put(done, &bytes[..used])?;
                    self.reader.consume(used);
                    done += used as u64;
                }
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) => return Err(damaged(self.format, &e)),
            }
        }
        self.position += length;
        Ok(())
    }
}

fn buffered<'a>(decoder: impl Read + 'a) -> Box<dyn BufRead + 'a> {
    Box::new(BufReader::with_capacity(PIECE, decoder))
}

fn damaged(format: Format, what: &dyn std::fmt::Display) -> String {
    format!("has a damaged {format:?} payload ({what})")
}

/// The container of lzop: a header of which only the length matters, then blocks
/// of big-endian unpacked size, packed size and Adler-32, until a size of 0.
fn unpack_lzop(packed: &[u8], size: u64) -> Result<Vec<u8>, String> {
    /// Magic, and the header's fields up to the flags.
    const FLAGS: usize = 9 + 2 + 2 + 2 + 1 + 1;
    /// Flag of a filter, which adds a field.
    const FILTER: u32 = 0x800;
    let short = || "it is cut short".to_string();
    let word = |at: usize| {
        let bytes = packed.get(at..at + 4).ok_or_else(short)?;
        Ok::<_, String>(bytes.iter().fold(0, |word, byte| word << 8 | u32::from(*byte)))
    };
    // Mode and two halves of the time, then the name and the header's checksum.
    let filter = if word(FLAGS)? & FILTER != 0 { 4 } else { 0 };
    let name = FLAGS + 4 + filter + 12;
    let name_length = usize::from(*packed.get(name).ok_or_else(short)?);
    let mut at = name + 1 + name_length + 4;
    let mut unpacked = Vec::with_capacity(size as usize);
    loop {
        let full = word(at)? as usize;
        if full == 0 {
            return Ok(unpacked);
        }
        let length = word(at + 4)? as usize;
        if full > LZO_BLOCK || length > full || unpacked.len() as u64 + full as u64 > size {
            return Err("a block is longer than it may be".into());
        }
        let block = packed.get(at + 12..at + 12 + length).ok_or_else(short)?;
        if length == full {
            unpacked.extend_from_slice(block);
        } else {
            let from = unpacked.len();
            unpacked.resize(from + full, 0);
            let filled = lzokay::decompress::decompress(block, &mut unpacked[from..]);
            if filled.map_err(|e| e.to_string())? != full {
                return Err("a block is not as long as it says".into());
            }
        }
        at += 12 + length;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    /// Compresses well, and not into one run.
    fn sample() -> Vec<u8> {
        (0..700_000u32).map(|i| (i / 7 % 251) as u8 ^ (i >> 12) as u8).collect()
    }

    /// As Linux's build would leave it: the size stands at the end.
    fn packed(format: Format, bytes: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        match format {
            Format::Gzip => {
                let level = flate2::Compression::fast();
                let mut writer = flate2::write::GzEncoder::new(&mut out, level);
                writer.write_all(bytes).unwrap();
                writer.finish().unwrap();
                return out;
            }
            Format::Bzip2 => {
                let level = bzip2::Compression::fast();
                let mut writer = bzip2::write::BzEncoder::new(&mut out, level);
                writer.write_all(bytes).unwrap();
                writer.finish().unwrap();
            }
            Format::Lzma => {
                let options = lzma_rust2::LzmaOptions::with_preset(1);
                let writer = lzma_rust2::LzmaWriter::new_use_header(&mut out, &options, None);
                let mut writer = writer.unwrap();
                writer.write_all(bytes).unwrap();
                writer.finish().unwrap();
            }
            Format::Xz => {
                let options = lzma_rust2::XzOptions::with_preset(1);
                let mut writer = lzma_rust2::XzWriter::new(&mut out, options).unwrap();
                writer.write_all(bytes).unwrap();
                writer.finish().unwrap();
            }
            Format::Lzo => {
                out.extend(b"\x89LZO\0\r\n\x1a\n");
                out.extend([0x10, 0x30, 0x20, 0xa0, 0x09, 0x40, 1, 5]); // versions, method, level
                out.extend([0; 16]); // flags, mode, time
                out.extend([4]);
                out.extend(b"name");
                out.extend([0; 4]); // checksum of the header
                for block in bytes.chunks(LZO_BLOCK) {
                    let small = lzokay::compress::compress(block).unwrap();
                    out.extend((block.len() as u32).to_be_bytes());
                    out.extend((small.len() as u32).to_be_bytes());
                    out.extend([0; 4]); // checksum of the block
                    out.extend(small);
                }
                out.extend([0; 4]);
            }
            Format::Lz4 => {
                out.extend([0x02, 0x21, 0x4c, 0x18]);
                let small = lz4_flex::block::compress(bytes);
                out.extend((small.len() as u32).to_le_bytes());
                out.extend(small);
            }
            Format::Zstd => {
                let level = ruzstd::encoding::CompressionLevel::Fastest;
                out = ruzstd::encoding::compress_to_vec(bytes, level);
            }
        }
        out.extend((bytes.len() as u32).to_le_bytes());
        out
    }

    const ALL: [Format; 7] = [
        Format::Gzip,
        Format::Bzip2,
        Format::Lzma,
        Format::Xz,
        Format::Lzo,
        Format::Lz4,
        Format::Zstd,
    ];

    /// The whole of what comes out.
    fn unpack(format: Format, payload: &[u8]) -> Result<Vec<u8>, String> {
        let (packed, size) = payload.split_last_chunk::<4>().ok_or("too short")?;
        let size = u64::from(u32::from_le_bytes(*size));
        let packed = if format == Format::Gzip { payload } else { packed };
        let mut unpacked = Unpacked::open(format, packed, size)?;
        let mut bytes = Vec::new();
        unpacked.copy(0, size / 2, |at, piece| {
            assert_eq!(at, bytes.len() as u64);
            bytes.extend(piece);
            Ok(())
        })?;
        let rest = unpacked.position;
        unpacked.copy(rest, size - rest, |_, piece| {
            bytes.extend(piece);
            Ok(())
        })?;
        unpacked.finish().map(|()| bytes)
    }

    #[test]
    fn every_format_of_linux_is_unpacked() {
        let bytes = sample();
        for format in ALL {
            let packed = packed(format, &bytes);
            assert_eq!(Format::of(&packed), Some(format));
            let unpacked = unpack(format, &packed);
            assert!(unpacked.as_ref() == Ok(&bytes), "{format:?}: {:?}", unpacked.err());
        }
        assert_eq!(Format::of(b"what"), None);
        assert_eq!(Format::of(b""), None);
    }

    #[test]
    fn damage_is_told_never_booted() {
        let bytes = sample();
        for format in ALL {
            let good = packed(format, &bytes);
            for length in [0, 3, 4, 20, good.len() / 2, good.len() - 5] {
                // The size is right, and the stream is not.
                let mut cut = good[..length].to_vec();
                cut.extend((bytes.len() as u32).to_le_bytes());
                let error = unpack(format, &cut);
                assert!(error.is_err(), "{format:?} cut at {length}");
            }
            for wrong in [-1, 1] {
                let mut longer = good.clone();
                let (at, size) = (longer.len() - 4, bytes.len() as i32 + wrong);
                longer[at..].copy_from_slice(&size.to_le_bytes());
                let error = unpack(format, &longer).unwrap_err();
                assert!(error.contains("damaged"), "{error}");
            }
        }
    }

    #[test]
    fn nothing_unpacks_to_more_than_it_says_or_the_guest_has() {
        let bytes = vec![0; 4 << 20];
        for format in ALL {
            let mut bomb = packed(format, &bytes);
            let at = bomb.len() - 4;
            bomb[at..].copy_from_slice(&10_000u32.to_le_bytes());
            let error = unpack(format, &bomb).unwrap_err();
            assert!(error.contains("damaged"), "{format:?}: {error}");
        }
        assert!(check_size(5, 5, 5).is_ok());
        assert!(check_size(6, 5, 100).unwrap_err().contains("init_size"));
        assert!(check_size(6, 100, 5).unwrap_err().contains("--memory"));
    }

    #[test]
    fn going_back_is_refused() {
        let packed = packed(Format::Zstd, &sample());
        let mut unpacked = Unpacked::open(Format::Zstd, &packed[..], 700_000).unwrap();
        assert_eq!(unpacked.head(), &sample()[..4096]);
        unpacked.copy(100, 100, |_, _| Ok(())).unwrap();
        assert!(unpacked.copy(199, 1, |_, _| Ok(())).is_err());
    }
}
