//! One Linux, three ways in: unpacked by itself, unpacked by us, and as the
//! vmlinux that it holds.

#![allow(clippy::unwrap_used)] // a test

use guest_tests::lab::Lab;
use guest_tests::progress::Progress;
use guest_tests::resources;
use guest_tests::results;
use guest_tests::vm::linux_files;
use std::io::Read;
use std::path::Path;
use std::time::Duration;

/// The vmlinux in a bzImage whose payload is LZ4, as Debian 12's is.
fn vmlinux(bzimage: &Path) -> Vec<u8> {
    let image = std::fs::read(bzimage).unwrap();
    let word = |at: usize| u32::from_le_bytes(image[at..at + 4].try_into().unwrap()) as usize;
    let start = (usize::from(image[0x1f1]) + 1) * 512 + word(0x248);
    // The last four bytes are the size.
    let packed = &image[start..start + word(0x24c) - 4];
    let mut vmlinux = Vec::new();
    lz4_flex::frame::FrameDecoder::new(packed).read_to_end(&mut vmlinux).unwrap();
    vmlinux
}

#[test]
fn lab_linux_boots_by_setup_by_payload_and_as_vmlinux() {
    let mut progress = Progress::new(true);
    let mut files = linux_files(&mut progress).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let unpacked = directory.path().join("vmlinux");
    // The kernel that $KERNEL may name need not be LZ4; this one is Debian's.
    let debian = resources::kernel(&mut progress, Some("stable")).unwrap();
    std::fs::write(&unpacked, vmlinux(&debian)).unwrap();
    files.push(("vmlinux".into(), unpacked));

    let mut lab = Lab::new(
        "run() { name=$1; shift; \
         vmm \"$@\" --initrd initrd --stats out/$name.json \
         --cmdline 'console=ttyS0 earlyprintk=ttyS0 run=clocksource,poweroff' >out/$name.txt || exit; }
         run setup --kernel bzImage --boot setup
         run payload --kernel bzImage --boot payload
         run vmlinux --kernel vmlinux",
    );
    lab.files = files;
    lab.timeout = Duration::from_secs(900);
    let output = lab.run().unwrap();
    assert_eq!(output.status, 0, "{}", String::from_utf8_lossy(&output.stderr));

    let file = |name: &str| {
        let found = output.files.iter().find(|(n, _)| n == name);
        String::from_utf8_lossy(&found.unwrap_or_else(|| panic!("no {name}")).1).into_owned()
    };
    // From the start of vmm, and of that the guest's part, in s.
    let first_byte = |name: &str| {
        let console = results::parse(&file(&format!("{name}.txt")));
        assert!(results::select(&console, "job", "clocksource").count() == 1, "{name}: no /init");
        let stats: serde_json::Value =
            serde_json::from_str(&file(&format!("{name}.json"))).unwrap();
        let at = |what: &str| {
            let marks = stats["marks"].as_array().unwrap();
            marks.iter().find(|mark| mark["name"] == what).unwrap()["ns"].as_f64().unwrap() / 1e9
        };
        let (whole, entered) = (at("first console byte"), at("vcpu 0 enters"));
        println!(
            "{name}: first byte after {whole:.2} s, {:.2} s of it in the guest",
            whole - entered
        );
        whole - entered
    };
    let [setup, payload, vmlinux] = ["setup", "payload", "vmlinux"].map(first_byte);
    // What is unpacked for the guest costs it no time. How the whole compares depends
    // on the host: where it, too, is emulated it unpacks no faster than the guest.
    assert!(payload <= 0.5 * setup, "setup {setup:.2} s, payload {payload:.2} s");
    assert!(vmlinux <= 0.5 * setup, "setup {setup:.2} s, vmlinux {vmlinux:.2} s");
}
