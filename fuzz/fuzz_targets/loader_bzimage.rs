//! bzImages with any header that is one at all.
#![no_main]

use fuzz::loader::check;
use libfuzzer_sys::fuzz_target;
use vmm::loader::Boot;

/// The setup header's fields, from 0x1f1.
const HEADER: usize = 0x1f1;

fuzz_target!(|input: (u8, Vec<u8>)| {
    let (boot, fields) = input;
    let mut image = vec![0; HEADER];
    image.extend(fields);
    image.resize(image.len().max(1024), 0);
    image[0x202..0x206].copy_from_slice(b"HdrS");
    image[0x206..0x208].copy_from_slice(&[15, 2]);
    image[0x211] |= 1;
    check(&image, [Boot::Auto, Boot::Setup, Boot::Payload][usize::from(boot % 3)]);
});
