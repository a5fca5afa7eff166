//! Every kind of kernel image boots, and every damaged one is refused in a line.

#![allow(clippy::unwrap_used)] // a failed unwrap is a failed test

mod common;

use common::image::{self, BASE, Segment};
use common::{run, vmm};
use std::path::Path;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(20);
/// The image's exit code 5, as `--debug-exit` tells it.
const EXIT_5: i32 = 5 << 1 | 1;

/// Boots an image and returns what it printed.
fn boot(directory: &Path, image: &[u8], arguments: &[&str]) -> String {
    let path = directory.join("test.flat");
    std::fs::write(&path, image).expect("a temporary file");
    let mut command = vmm();
    command.arg("--kernel").arg(path).args(["--debug-exit", "--memory", "64M"]).args(arguments);
    let outcome = run(&mut command, LIMIT);
    assert_eq!(outcome.status, EXIT_5, "{command:?}: {outcome:?}");
    outcome.stdout
}

#[test]
fn every_kind_of_image_boots() {
    if !common::kvm_or_skip("every_kind_of_image_boots") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let boot = |image: &[u8], arguments: &[&str]| boot(directory.path(), image, arguments);
    for image in [
        image::pvh(false),
        image::pvh(true),
        image::linux64(),
        image::bzimage(true, &image::gzip(&image::vmlinux(true))),
        image::bzimage(false, &image::gzip(&image::vmlinux(false))),
    ] {
        assert_eq!(boot(&image, &["--cmdline", "a b"]), "a b|isfm");
        assert_eq!(boot(&image, &[]), "console=ttyS0|isfm");
    }
    for long in [false, true] {
        let image = image::bzimage(long, &image::gzip(&image::vmlinux(long)));
        assert_eq!(boot(&image, &["--boot", "setup", "--cmdline", "s"]), "s|isfm");
        assert_eq!(boot(&image, &["--boot", "payload", "--cmdline", "p"]), "p|isfm");
        // A format that we do not know: the guest unpacks it.
        assert_eq!(boot(&image::bzimage(long, b"what is it?"), &["--cmdline", "o"]), "o|isfm");
    }
}

#[test]
fn a_unit_test_finds_its_arguments_and_its_environment() {
    if !common::kvm_or_skip("a_unit_test_finds_its_arguments_and_its_environment") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let boot = |arguments: &[&str]| boot(directory.path(), &image::multiboot(), arguments);
    let environment = "NR_CPUS=2\nMEMSIZE=64\nTEST_DEVICE=1\nBOOTLOADER=0\n";
    assert_eq!(boot(&["--cpus", "2"]), format!("test.flat|{environment}isfm"));
    let module = directory.path().join("module");
    std::fs::write(&module, "A=1\n").unwrap();
    let module = module.display().to_string();
    assert_eq!(boot(&["--initrd", &module, "--cmdline", "x y"]), "test.flat x y|A=1\nisfm");
}

/// A damaged image is one line, exit code 35, and never a started guest.
fn refused(directory: &Path, what: &str, image: &[u8], says: &str) {
    let path = directory.join("image");
    std::fs::write(&path, image).expect("a temporary file");
    let outcome = run(vmm().arg("-k").arg(path).args(["--memory", "64M"]), LIMIT);
    let shown = format!("{what}: {outcome:?}");
    assert_eq!(outcome.status, 35, "{shown}");
    assert_eq!(outcome.stderr.lines().count(), 1, "{shown}");
    assert!(
        outcome.stderr.starts_with("vmm: --kernel ") && outcome.stderr.contains(says),
        "{shown}"
    );
    assert_eq!(outcome.stdout, "", "{shown}");
}

#[test]
fn damaged_images_are_refused() {
    if !common::kvm_or_skip("damaged_images_are_refused") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let refused = |what: &str, image: &[u8], says: &str| {
        refused(directory.path(), what, image, says);
    };
    let code = || image::program(true);
    let elf = |segments: &[Segment]| image::elf(true, BASE, segments);
    let claims = |address: u64, filesz: u64, memsz: u64| Segment {
        filesz: Some(filesz),
        memsz: Some(memsz),
        ..Segment::load(address, code())
    };
    let size = code().len() as u64;
    let over = |address: u64| elf(&[Segment::load(BASE, code()), Segment::load(address, code())]);

    let good = image::linux64();
    refused("ELF cut in its header", &good[..40], "damaged");
    refused("ELF cut in its program headers", &good[..100], "damaged");
    refused("ELF cut in a segment", &good[..good.len() - 1], "cut short");
    refused("no segment", &elf(&[]), "without a segment");
    refused("a segment that wraps", &elf(&[claims(u64::MAX - 10, size, 100)]), "wraps");
    refused("more in the file than in memory", &elf(&[claims(BASE, size, 1)]), "for 0x1 of");
    refused(
        "a file size that wraps",
        &elf(&[claims(BASE, u64::MAX - BASE, u64::MAX - BASE)]),
        "cut short",
    );
    refused("a bss beyond memory", &elf(&[claims(BASE, size, 1 << 30)]), "--memory");
    refused("a segment in the device hole", &over(0xfed0_0000), "--memory");
    let overlap = [Segment::load(BASE, code()), Segment::load(BASE + 4, code())];
    refused("overlapping segments", &elf(&overlap), "two segments");
    refused("a segment over the zero page", &over(0x7ff8), "boot tables");
    refused("a segment over the page tables", &over(0xe800), "boot tables");
    refused("a segment over the command line", &over(0x2_0000), "boot tables");
    refused("a segment over the ACPI tables", &over(0xe_1000), "boot tables");
    let outside = image::elf(true, BASE - 1, &[Segment::load(BASE, code())]);
    refused("an entry outside of the image", &outside, "enters at");
    let beyond = image::elf(true, 1 << 40, &[Segment::load(BASE, code())]);
    refused("an entry outside of memory", &beyond, "beyond 4 GiB");
    let pvh = [Segment::load(BASE, code()), Segment::pvh(0x10)];
    refused("a PVH entry outside of the image", &elf(&pvh), "enters at");
    let bare32 = image::elf(false, BASE, &[Segment::load(BASE, image::program(false))]);
    refused("ELF32 without a way in", &bare32, "Multiboot header");
    let mut video = image::multiboot_header(1 << 2);
    video.extend(image::program(false));
    let video = image::elf(false, BASE + 12, &[Segment::load(BASE, video)]);
    refused("Multiboot with a video mode", &video, "0x4");
    refused("Multiboot without ELF", &image::multiboot_header(3).repeat(60), "not ELF");
    let mut big_endian = good.clone();
    big_endian[5] = 2;
    refused("big-endian ELF", &big_endian, "another machine");
    refused("a compressed vmlinux", &image::gzip(&good.repeat(9)), "compressed");

    let vmlinux = image::vmlinux(true);
    let bz = |payload: &[u8]| image::bzimage(true, payload);
    let with = |at: usize, size: usize, value: u64| {
        let mut image = bz(&image::gzip(&vmlinux));
        image::put(&mut image, at, size, value);
        image
    };
    refused("bzImage cut in its header", &with(0, 1, 0)[..0x210], "cut short");
    let whole = with(0, 1, 0);
    refused("bzImage cut in its code", &whole[..whole.len() - 1], "cut short");
    refused("bzImage of an old protocol", &with(0x206, 2, 0x0203), "2.03");
    refused("zImage", &with(0x211, 1, 0), "zImage");
    refused("init_size 0", &with(0x260, 4, 0), "init_size");
    refused("payload beyond the image", &with(0x24c, 4, 0xffff_ffff), "beyond the image");
    refused("payload offset that wraps", &with(0x248, 4, 0xffff_fff0), "beyond the image");
    let mut corrupt = image::gzip(&vmlinux);
    let middle = corrupt.len() / 2;
    corrupt[middle] ^= 0xff;
    refused("a corrupt payload", &bz(&corrupt), "damaged Gzip payload");
    let packed = image::gzip(&vmlinux);
    refused("a payload cut short", &bz(&packed[..packed.len() - 9]), "damaged");
    let bomb = image::gzip(&vec![0; 100 << 20]);
    refused("a payload of more than init_size", &bz(&bomb), "init_size");
    let mut bomb = bz(&bomb);
    image::put(&mut bomb, 0x260, 4, 128 << 20);
    refused("a payload of more than RAM", &bomb, "--memory");
    refused("a payload that is no ELF", &bz(&image::gzip(&[1; 5000])), "payload that");
    let other = image::gzip(&image::vmlinux(false));
    refused("a 32-bit payload in a 64-bit image", &bz(&other), "word size");
    let high = image::elf(true, 1 << 33, &[Segment::load(1 << 33, code())]);
    refused("a payload linked beyond 4 GiB", &bz(&image::gzip(&high)), "beyond 4 GiB");
    let high = image::elf(true, 1 << 30, &[Segment::load(1 << 30, code())]);
    refused("a payload linked beyond memory", &bz(&image::gzip(&high)), "--memory");
    let lzo = [
        b"\x89LZO\0\r\n\x1a\n".as_slice(),
        &[0; 8 + 17 + 4], // versions, method, level; flags, mode, time, no name; checksum
        &100_u32.to_be_bytes(), // unpacked
        &7_u32.to_be_bytes(), // packed
        &[0; 4],          // checksum
        &[0x12, 0xaa, 0x40, 0xff, 0x11, 0, 0], // a literal, a copy from 2041 bytes back, the end
        &[0; 4],
        &100_u32.to_le_bytes(),
    ];
    refused("LZO that copies from before its start", &bz(&lzo.concat()), "damaged Lzo payload");
    let unknown = directory.path().join("unknown");
    std::fs::write(&unknown, bz(b"what is it?")).unwrap();
    let outcome = run(vmm().arg("-k").arg(unknown).args(["--boot", "payload"]), LIMIT);
    assert!(outcome.status == 35 && outcome.stderr.contains("--boot setup"), "{outcome:?}");
}
