//! Writes sound images for the loaders' fuzz targets to start from: a mutation of one gets
//! further than random bytes do. `cargo run -p vmm --example fuzz_seeds -- fuzz/corpus`

#![allow(dead_code)] // of the images, those that a seed is made of

use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

#[path = "../tests/common/image.rs"]
mod image;

fn main() -> ExitCode {
    let Some(directory) = std::env::args_os().nth(1) else {
        eprintln!("fuzz_seeds: name the directory to write to");
        return ExitCode::FAILURE;
    };
    match write(Path::new(&directory)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("fuzz_seeds: {}: {e}", Path::new(&directory).display());
            ExitCode::FAILURE
        }
    }
}

/// Every seed in the form that its target reads: see fuzz/fuzz_targets.
fn write(directory: &Path) -> io::Result<()> {
    let put = |target: &str, name: &str, parts: &[&[u8]]| {
        let directory = directory.join(target);
        std::fs::create_dir_all(&directory)?;
        std::fs::write(directory.join(format!("seed-{name}")), parts.concat())
    };
    for (name, long, elf) in [
        ("multiboot", 0, image::multiboot()),
        ("pvh32", 0, image::pvh(false)),
        ("pvh64", 1, image::pvh(true)),
        ("linux64", 1, image::linux64()),
    ] {
        put("loader_elf", name, &[&[long], &elf])?;
    }
    for long in [false, true] {
        let vmlinux = image::vmlinux(long);
        let bits = if long { "64" } else { "32" };
        for (boot, name) in ["auto", "setup", "payload"].into_iter().enumerate() {
            let image = image::bzimage(long, &image::gzip(&vmlinux));
            put("loader_bzimage", &format!("{name}{bits}"), &[&[boot as u8], &image[0x1f1..]])?;
        }
        for (format, (name, magic, stream)) in streams(&vmlinux)?.into_iter().enumerate() {
            let parts: &[&[u8]] = &[&[format as u8, u8::from(long)], &stream[magic..]];
            put("loader_payload", &format!("{name}{bits}"), parts)?;
        }
        put("loader_payload", &format!("elf{bits}"), &[&[7, u8::from(long)], &vmlinux])?;
    }
    Ok(())
}

/// The payload in each format, in the target's order: name, bytes of the magic, stream. The
/// size stands at the end, as Linux's build leaves it.
fn streams(bytes: &[u8]) -> io::Result<Vec<(&'static str, usize, Vec<u8>)>> {
    let mut bzip2 = bzip2::write::BzEncoder::new(Vec::new(), bzip2::Compression::best());
    bzip2.write_all(bytes)?;
    let options = lzma_rust2::LzmaOptions::with_preset(1);
    let mut lzma = lzma_rust2::LzmaWriter::new_use_header(Vec::new(), &options, None)?;
    lzma.write_all(bytes)?;
    let mut xz = lzma_rust2::XzWriter::new(Vec::new(), lzma_rust2::XzOptions::with_preset(1))?;
    xz.write_all(bytes)?;
    let small = lzokay::compress::compress(bytes).map_err(io::Error::other)?;
    let [size, packed] = [bytes.len(), small.len()].map(|n| (n as u32).to_be_bytes());
    let lzo = [
        b"\x89LZO\0\r\n\x1a\n".as_slice(),
        &[0x10, 0x30, 0x20, 0xa0, 0x09, 0x40, 1, 5], // versions, method, level
        &[0; 17],                                    // flags, mode, time, no name
        &[0; 4],                                     // checksum of the header
        &size,
        &packed,
        &[0; 4], // checksum of the block
        &small,
        &[0; 4], // the end
    ];
    let small = lz4_flex::block::compress(bytes);
    let lz4 = [[2, 0x21, 0x4c, 0x18], (small.len() as u32).to_le_bytes()].concat();
    let level = ruzstd::encoding::CompressionLevel::Fastest;
    let zstd = ruzstd::encoding::compress_to_vec(bytes, level);
    let sized = |stream: &[u8]| [stream, &(bytes.len() as u32).to_le_bytes()].concat();
    Ok(vec![
        ("gzip", 4, image::gzip(bytes)),
        ("bzip2", 4, sized(&bzip2.finish()?)),
        ("lzma", 3, sized(&lzma.finish()?)),
        ("xz", 6, sized(&xz.finish()?)),
        ("lzo", 9, sized(&lzo.concat())),
        ("lz4", 4, sized(&[lz4, small].concat())),
        ("zstd", 4, sized(&zstd)),
    ])
}
