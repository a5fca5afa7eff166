//! Links every program as a static ELF64 image for the bare machine.

fn main() {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/guest.ld");
    println!("cargo:rerun-if-changed={script}");
    for argument in [
        "-nostartfiles",
        "-nostdlib",
        "-static",
        "-no-pie",
        "-Wl,--build-id=none",
        "-Wl,-z,max-page-size=4096",
        "-Wl,-z,noexecstack",
    ] {
        println!("cargo:rustc-link-arg-bins={argument}");
    }
    println!("cargo:rustc-link-arg-bins=-Wl,-T,{script}");
}
