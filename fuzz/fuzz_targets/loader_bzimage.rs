//! bzImages with any header that is one at all. The first byte chooses `--boot`, the rest is the
//! image from its header on.
#![no_main]

use fuzz::loader::check;
use libfuzzer_sys::fuzz_target;
use vmm::loader::Boot;

/// The setup header's fields, from 0x1f1.
const HEADER: usize = 0x1f1;

fuzz_target!(|input: &[u8]| {
    let Some((boot, fields)) = input.split_first() else { return };
    let mut image = vec![0; HEADER];
    image.extend(fields);
    image.resize(image.len().max(1024), 0);
    image[0x202..0x206].copy_from_slice(b"HdrS");
    image[0x206..0x208].copy_from_slice(&[15, 2]);
    image[0x211] |= 1;
    check(&image, [Boot::Auto, Boot::Setup, Boot::Payload][usize::from(boot % 3)]);
});
