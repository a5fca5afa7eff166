//! How much memory the kernel has, and whether what it was given is intact.

use crate::report::Result as Report;
use crate::system;
use std::fs::File;
use std::io::Read;

/// `memory:FILE`: prints MemTotal of /proc/meminfo, and FILE's length and FNV-1a hash.
///
/// # Errors
/// No FILE, or one that cannot be read.
pub fn run(arguments: &[String]) -> Result<(), String> {
    let path = arguments.first().ok_or("name a file: memory:FILE")?;
    let (bytes, hash) = length_and_hash(path).map_err(|e| format!("{path}: {e}"))?;
    let text = system::read("/proc/meminfo")?;
    Report::of("memory")
        .count("mem_total_kib", total_kib(&text).ok_or("/proc/meminfo: no MemTotal")?)
        .count("file_bytes", bytes)
        .text("file_fnv1a", &format!("{hash:016x}"))
        .print();
    Ok(())
}

fn total_kib(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix(" kB")?.parse().ok()
}

fn length_and_hash(path: &str) -> std::io::Result<(u64, u64)> {
    let mut file = File::open(path)?;
    let (mut length, mut hash) = (0, 0xcbf2_9ce4_8422_2325_u64);
    let mut chunk = [0; 1 << 16];
    loop {
        let read = file.read(&mut chunk)?;
        if read == 0 {
            return Ok((length, hash));
        }
        length += read as u64;
        for byte in &chunk[..read] {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_total_is_found() {
        assert_eq!(total_kib("MemTotal:         223768 kB\nMemFree: 1 kB\n"), Some(223_768));
        assert_eq!(total_kib("MemFree: 1 kB\n"), None);
    }
}
