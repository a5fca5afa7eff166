//! ELF images of either class, by whichever way in they offer.
#![no_main]

use fuzz::loader::check;
use libfuzzer_sys::fuzz_target;
use vmm::loader::Boot;

fuzz_target!(|input: (bool, Vec<u8>)| {
    let (long, mut image) = input;
    if image.len() < 64 {
        image.resize(64, 0);
    }
    image[..7].copy_from_slice(&[0x7f, b'E', b'L', b'F', 1 + u8::from(long), 1, 1]);
    image[18..20].copy_from_slice(&[if long { 62 } else { 3 }, 0]);
    check(&image, Boot::Auto);
});
