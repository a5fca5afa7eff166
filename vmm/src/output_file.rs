//! Files that we are told to write.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

/// Makes a file, or opens what is there, and finds out whether it takes anything: an
/// empty write changes no file, and devices and kernel files refuse it as any other.
///
/// # Errors
/// What the host says.
pub fn create(path: &Path) -> io::Result<File> {
    let mut file = File::create(path)?;
    file.write(&[]).map(|_| file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_takes_nothing_is_known_at_once() {
        for path in ["/dev/full", "/proc/version", "/", "/no/such/directory/file"] {
            assert!(create(path.as_ref()).is_err(), "{path}");
        }
        assert!(create("/dev/null".as_ref()).is_ok());
    }
}
