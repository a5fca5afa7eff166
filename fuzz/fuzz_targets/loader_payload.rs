//! Payloads of every format in a sound bzImage, and the ELF image that comes out. The first byte is
//! the format, the second the image's word size, the rest what follows the format's magic.
#![no_main]

use std::io::Write;

use fuzz::loader::check;
use libfuzzer_sys::fuzz_target;
use vmm::loader::Boot;

const MAGICS: [&[u8]; 7] = [
    &[0x1f, 0x8b, 8, 0],
    b"BZh9",
    &[0x5d, 0, 0],
    b"\xfd7zXZ\0",
    b"\x89LZO\0\r\n\x1a\n",
    &[0x02, 0x21, 0x4c, 0x18],
    &[0x28, 0xb5, 0x2f, 0xfd],
];

fuzz_target!(|input: &[u8]| {
    let [format, long, bytes @ ..] = input else { return };
    let long = long & 1 != 0;
    let payload = match MAGICS.get(usize::from(format % 8)) {
        Some(magic) => [magic, bytes].concat(),
        // A sound stream of a damaged ELF image.
        None => {
            let mut writer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::none());
            writer.write_all(bytes).expect("memory");
            writer.finish().expect("memory")
        }
    };
    check(&bzimage(long, &payload), Boot::Payload);
});

fn bzimage(long: bool, payload: &[u8]) -> Vec<u8> {
    let mut code = payload.to_vec();
    code.resize(code.len().next_multiple_of(16), 0);
    let mut image = vec![0; 1024];
    let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    put(0x1f1, &[1]);
    put(0x1f4, &(code.len() as u32 / 16).to_le_bytes());
    put(0x202, b"HdrS");
    put(0x206, &[15, 2]);
    put(0x211, &[1]);
    put(0x236, &[u8::from(long)]);
    put(0x238, &255u32.to_le_bytes());
    put(0x24c, &(payload.len() as u32).to_le_bytes());
    put(0x260, &(16u32 << 20).to_le_bytes());
    image.extend(code);
    image
}
