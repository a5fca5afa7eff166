//! The machine's serial ports, as events.

use super::Port;
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::Sender;

/// More than this from one port is a guest gone wild; the rest is dropped.
pub const MAX_PORT_BYTES: usize = 256 << 20;

/// What happens to the machine.
pub enum Event {
    /// Output came.
    Bytes(Port, Vec<u8>),
    /// A step of the machine's began.
    Step(String),
    /// The command began.
    Begin,
    /// The command ended with a status.
    Exit(i32),
    /// A file it left: name and content.
    File(String, Vec<u8>),
    /// QEMU's own words.
    QemuSaid(Vec<u8>),
    /// QEMU closed its own standard error: it has ended.
    QemuEnded,
}

/// Passes bytes on as they come.
pub fn pump(
    mut from: impl Read,
    to: &Sender<Event>,
    wrap: impl Fn(Vec<u8>) -> Event,
) -> io::Result<()> {
    let mut buffer = [0; 4096];
    loop {
        match from.read(&mut buffer)? {
            0 => return Ok(()),
            length => {
                if to.send(wrap(buffer[..length].to_vec())).is_err() {
                    return Ok(());
                }
            }
        }
    }
}

/// Reads the protocol's lines and files to the end of the machine.
pub fn protocol(stream: UnixStream, to: &Sender<Event>) -> io::Result<()> {
    let mut stream = BufReader::new(stream);
    let mut line = String::new();
    while stream.read_line(&mut line)? > 0 {
        let (word, rest) = line.trim_end().split_once(' ').unwrap_or((line.trim_end(), ""));
        let event = match word {
            "step" => Event::Step(rest.to_owned()),
            "begin" => Event::Begin,
            "exit" => Event::Exit(rest.parse().unwrap_or(255)),
            "file" => {
                let (size, name) = rest.split_once(' ').unwrap_or((rest, ""));
                let size: u64 = size.parse().map_err(io::Error::other)?;
                let mut bytes = Vec::new();
                stream.by_ref().take(size.min(MAX_PORT_BYTES as u64)).read_to_end(&mut bytes)?;
                Event::File(name.to_owned(), bytes)
            }
            _ => Event::Step("turning the lab off".into()),
        };
        if to.send(event).is_err() {
            return Ok(());
        }
        line.clear();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::sync::mpsc::channel;

    #[test]
    fn the_protocol_carries_status_and_binary_files() {
        let (mut guest, host) = UnixStream::pair().unwrap();
        guest
            .write_all(b"step loading KVM\nbegin\nexit 33\nfile 5 a b.bin\n\n\0\xffx\nend\n")
            .unwrap();
        drop(guest);
        let (sender, events) = channel();
        protocol(host, &sender).unwrap();
        drop(sender);
        let events: Vec<Event> = events.iter().collect();
        assert!(matches!(&events[0], Event::Step(words) if words == "loading KVM"));
        assert!(matches!(events[1], Event::Begin));
        assert!(matches!(events[2], Event::Exit(33)));
        assert!(
            matches!(&events[3], Event::File(name, bytes) if name == "a b.bin" && bytes == b"\n\0\xffx\n")
        );
        assert_eq!(events.len(), 5);
    }
}
