//! Reads `count` (1) bytes from the console's input, as fast as they come, and tells what it got:
//! how many, and their FNV-1a hash; the bytes themselves too where they are few. With `count=0`
//! reads for ever.
#![no_std]
#![no_main]

use guests::args::Args;
use guests::console::{self, ResultLine};
use guests::cpu::Cpu;
use guests::guest_main;

guest_main!(main);

/// Bytes shown one by one.
const SHOWN: usize = 64;

fn main(args: &Args, _cpu: &'static Cpu) {
    let count = args.number("count", 1);
    ResultLine::new("echo").text("state", "ready").end();
    let (mut got, mut hash, mut first) = (0_u64, 0xcbf2_9ce4_8422_2325_u64, [0_u8; SHOWN]);
    while count == 0 || got < count {
        if !console::has_input() {
            core::hint::spin_loop();
            continue;
        }
        let byte = console::receive();
        if let Some(slot) = first.get_mut(got as usize) {
            *slot = byte;
        }
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        got += 1;
    }
    let shown = &first[..SHOWN.min(got as usize)];
    ResultLine::new("echo").number("bytes", got).number("fnv1a", hash).list("first", shown).end();
}
