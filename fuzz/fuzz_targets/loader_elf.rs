//! ELF images of either class, by whichever way in they offer. The first byte is the class, the
//! rest the image.
#![no_main]

use fuzz::loader::check;
use libfuzzer_sys::fuzz_target;
use vmm::loader::Boot;

fuzz_target!(|input: &[u8]| {
    let Some((class, image)) = input.split_first() else { return };
    let long = class & 1 != 0;
    let mut image = image.to_vec();
    if image.len() < 64 {
        image.resize(64, 0);
    }
    image[..7].copy_from_slice(&[0x7f, b'E', b'L', b'F', 1 + u8::from(long), 1, 1]);
    image[18..20].copy_from_slice(&[if long { 62 } else { 3 }, 0]);
    check(&image, Boot::Auto);
});
