//! A stock Linux with memory of sizes around the 32-bit hole and an initrd of 30 MB: it
//! counts every page that `--memory` gives it, and finds the initrd intact.
//! `MEMORY_MIB=all`, or a list of sizes in MiB, boots others than the two of `make test`.

use guest_tests::experiment::{Common, run_all};
use guest_tests::progress::Progress;
use guest_tests::resources;
use guest_tests::results::{self, Result as Line, number, text};
use guest_tests::vm::{LabChoice, linux_files};
use std::path::Path;

const SOME_MIB: [u64; 2] = [256, 3330];
const AROUND: [u64; 6] = [256, 2048, 3072, 3330, 4096, 5120];
/// What no Linux counts: page 0, which it keeps from itself, and from the page of the
/// EBDA (0x9F000) to 1 MiB, which our map leaves out.
const NEVER_COUNTED_KIB: u64 = 4 + (0x10_0000 - 0x9_f000) / 1024;
const PAD: usize = 30_000_000;

fn sizes() -> Vec<u64> {
    match std::env::var("MEMORY_MIB").as_deref() {
        Err(_) => SOME_MIB.to_vec(),
        Ok("all") => AROUND.iter().flat_map(|mib| [mib - 1, *mib, mib + 1]).collect(),
        Ok(list) => list.split(',').map(|mib| mib.parse().expect("MiB")).collect(),
    }
}

/// Writes bytes that do not compress, and returns their hash.
fn write_pad(path: &Path) -> u64 {
    let mut random = 0x2545_f491_4f6c_dd1d_u64;
    let bytes: Vec<u8> = std::iter::repeat_with(|| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random.to_le_bytes()
    })
    .flatten()
    .take(PAD)
    .collect();
    std::fs::write(path, &bytes).expect("a temporary file");
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// The number of KiB before `end`.
fn kib_before(line: &str, end: &str) -> Option<u64> {
    line.split_once(end)?.0.rsplit(['/', ' ']).next()?.parse().ok()
}

/// Of the kernel's own account (mm/page_alloc.c, mem_init_print_info): what there is,
/// and what of it is the kernel's for good. The second is what was reserved at boot
/// without what each "Freeing … memory" line gave back: the initrd, init code, gaps.
fn account(lines: &[Line]) -> (u64, u64) {
    let said: Vec<_> =
        results::select(lines, "job", "dmesg").filter_map(|line| text(line, "text")).collect();
    let memory = said.iter().find(|line| line.starts_with("Memory: ")).expect("Memory: line");
    let freed: u64 = said
        .iter()
        .filter(|line| line.starts_with("Freeing "))
        .map(|line| kib_before(line, "K").or_else(|| kib_before(line, "k")).expect(line))
        .sum();
    let physical = kib_before(memory, "K available").expect(memory);
    let reserved = kib_before(memory, "K reserved").expect(memory);
    (physical, reserved - freed)
}

#[test]
fn lab_linux_has_the_memory_that_it_was_given() {
    let common = Common { lab: LabChoice::Auto, vmm_arg: Vec::new() };
    let mut progress = Progress::new(true);
    let mut files = linux_files(&mut progress).unwrap_or_else(|e| panic!("{e}"));
    let directory = tempfile::tempdir().expect("a directory");
    let (pad, initrd) = (directory.path().join("pad"), directory.path().join("initrd"));
    let hash = write_pad(&pad);
    let init = resources::program(&mut progress, "init").unwrap_or_else(|e| panic!("{e}"));
    let inside = [("/init".to_owned(), init), ("/pad".to_owned(), pad)];
    resources::initramfs(&mut progress, &initrd, &inside).unwrap_or_else(|e| panic!("{e}"));
    files.iter_mut().filter(|(name, _)| name == "initrd").for_each(|f| f.1.clone_from(&initrd));

    let jobs = "memory:/pad,dmesg:match:cma-reserved:Freeing,poweroff";
    let sizes = sizes();
    let vms: Vec<_> = sizes
        .iter()
        .map(|mib| {
            let memory = format!("{mib}M");
            let arguments = ["--hv-tsc-page", "--memory", &memory];
            common.linux(&format!("Linux with {memory}"), jobs, &files, &arguments)
        })
        .collect();
    let outcomes = run_all(&vms).unwrap_or_else(|e| panic!("{e}"));
    for (mib, ran) in sizes.into_iter().zip(outcomes) {
        let lines = results::parse(&ran.console);
        let found = results::select(&lines, "job", "memory").next();
        let found = found.unwrap_or_else(|| panic!("{mib} MiB:\n{}", ran.console));
        let total = number(found, "mem_total_kib").expect("a number") as u64;
        let (physical, kept) = account(&lines);
        println!("{mib} MiB: {physical} KiB counted, {kept} kept, MemTotal {total} KiB");
        assert_eq!(physical, mib * 1024 - NEVER_COUNTED_KIB, "{mib} MiB");
        assert_eq!(total, physical - kept, "{mib} MiB");
        // What is kept is explained: 64 bytes for each page of 4 KiB, the kernel itself
        // and its tables, and bounce buffers of 64 MiB where memory is above 4 GiB.
        let explained = (physical / 64) + (64 << 10) + if mib > 3072 { 64 << 10 } else { 0 };
        assert!(kept < explained, "{mib} MiB: {kept} KiB kept, {explained} explained");
        assert_eq!(number(found, "file_bytes"), Some(PAD as f64), "{mib} MiB: {found:?}");
        assert_eq!(text(found, "file_fnv1a"), Some(format!("{hash:016x}").as_str()), "{mib} MiB");
    }
}
