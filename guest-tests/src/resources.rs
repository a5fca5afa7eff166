//! What goes into a guest: kernels, our static programs, and images of both,
//! made by the scripts of `resources/`.

use crate::progress::{Progress, SILENCE};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};

/// Why something could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ResourceError {
    /// The script failed; its own words are on standard error.
    #[error("{0} failed: see its message above")]
    Failed(String),
    /// The script could not be run.
    #[error("{0}: {1}")]
    Start(String, #[source] io::Error),
}

/// A stock kernel's bzImage, fetched if it is not cached: `stable`, `6.12` or
/// `i386`; without a variant the guest's kernel, which `$KERNEL` may name.
///
/// # Errors
/// The package cannot be found or fetched.
pub fn kernel(progress: &mut Progress, variant: Option<&str>) -> Result<PathBuf, ResourceError> {
    let arguments: Vec<String> = variant.iter().map(ToString::to_string).collect();
    run(progress, "kernel", &arguments)
}

/// One of our programs (`init`, `vmm`, `init32`, `guest32-clock-cost`), statically linked.
///
/// # Errors
/// It does not build.
pub fn program(progress: &mut Progress, name: &str) -> Result<PathBuf, ResourceError> {
    run(progress, "program", &[name.into()])
}

/// Packs an initramfs at `out`: busybox and the files, each under an absolute path.
///
/// # Errors
/// A file is missing; busybox or cpio is not installed.
pub fn initramfs(
    progress: &mut Progress,
    out: &Path,
    files: &[(String, PathBuf)],
) -> Result<(), ResourceError> {
    let mut arguments = vec![out.display().to_string()];
    arguments.extend(files.iter().map(|(path, file)| format!("{path}={}", file.display())));
    run(progress, "initramfs", &arguments).map(drop)
}

/// Runs a script of `resources/`; returns the path that it prints, if any.
fn run(
    progress: &mut Progress,
    script: &str,
    arguments: &[String],
) -> Result<PathBuf, ResourceError> {
    let first = arguments.first().map_or("", String::as_str);
    let what = format!("resources/{script} {first}").trim_end().to_owned();
    progress.next(&what);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../resources").join(script);
    let failed = |e| ResourceError::Start(path.display().to_string(), e);
    let mut child = Command::new(&path)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    // The script's end of the pipe closes when it ends; until then say so.
    let (sender, lines) = channel();
    if let Some(mut out) = child.stdout.take() {
        std::thread::spawn(move || {
            let mut text = String::new();
            let _ = out.read_to_string(&mut text).map(|_| sender.send(text));
        });
    }
    let text = loop {
        match lines.recv_timeout(SILENCE) {
            Ok(text) => break text,
            Err(RecvTimeoutError::Timeout) => progress.remind(),
            Err(RecvTimeoutError::Disconnected) => break String::new(),
        }
    };
    match child.wait().map_err(failed)?.success() {
        true => Ok(PathBuf::from(text.trim_end())),
        false => Err(ResourceError::Failed(what)),
    }
}
