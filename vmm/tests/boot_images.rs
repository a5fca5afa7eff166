//! Every kind of kernel image boots, and every damaged one is refused in a line.

mod common;

use common::image;
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
        assert_eq!(boot(&image, &["--cmdline", "a b"]), "a b|isf");
        assert_eq!(boot(&image, &[]), "console=ttyS0|isf");
    }
    for long in [false, true] {
        let image = image::bzimage(long, &image::gzip(&image::vmlinux(long)));
        assert_eq!(boot(&image, &["--boot", "setup", "--cmdline", "s"]), "s|isf");
        assert_eq!(boot(&image, &["--boot", "payload", "--cmdline", "p"]), "p|isf");
        // A format that we do not know: the guest unpacks it.
        assert_eq!(boot(&image::bzimage(long, b"what?"), &["--cmdline", "o"]), "o|isf");
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
    assert_eq!(boot(&["--cpus", "2"]), format!("test.flat|{environment}isf"));
    let module = directory.path().join("module");
    std::fs::write(&module, "A=1\n").unwrap();
    let module = module.display().to_string();
    assert_eq!(boot(&["--initrd", &module, "--cmdline", "x y"]), "test.flat x y|A=1\nisf");
}
