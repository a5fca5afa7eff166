//! The person at the terminal: Ctrl-A is the escape key, everything else is the
//! guest's until the monitor is open.

use crate::console::Writer;
use crate::monitor::{Monitor, Next};
use std::io::Write;

/// Ctrl-A.
pub const ESCAPE: u8 = 0x01;

const HELP: &str = "\r\n\
    Ctrl-A x   quit\r\n\
    Ctrl-A c   open or close the monitor\r\n\
    Ctrl-A a   send Ctrl-A to the guest\r\n\
    Ctrl-A h   this help\r\n";

const PROMPT: &str = "(vmm) ";
/// Longest command line of the monitor.
const LONGEST_LINE: usize = 256;

/// What the person types, taken apart.
pub struct Operator {
    screen: Writer,
    monitor: Monitor,
    escaped: bool,
    /// The command being typed, while the monitor is open.
    line: Option<String>,
}

impl Operator {
    /// Shows its words on `screen`.
    pub fn new(screen: Writer, monitor: Monitor) -> Self {
        Self { screen, monitor, escaped: false, line: None }
    }

    /// Takes what was typed, and appends to `guest` what is for the guest.
    pub fn typed(&mut self, bytes: &[u8], guest: &mut Vec<u8>) {
        for &byte in bytes {
            match (std::mem::take(&mut self.escaped), byte) {
                (false, ESCAPE) => self.escaped = true,
                (true, b'x' | b'X') => self.monitor.quit(),
                (true, b'h' | b'H' | b'?') => self.say(HELP),
                (true, b'c' | b'C') if self.line.is_some() => self.close(),
                (true, b'c' | b'C') => self.open(),
                (true, b'a' | b'A' | ESCAPE) => guest.push(ESCAPE),
                // Another key after Ctrl-A means nothing, to nobody.
                (true, _) => {}
                (false, byte) if self.line.is_some() => self.edit(byte),
                (false, byte) => guest.push(byte),
            }
        }
    }

    fn say(&mut self, text: &str) {
        // The console's ring never fails: it drops and counts.
        let _ = self.screen.write_all(text.as_bytes());
    }

    fn open(&mut self) {
        self.line = Some(String::new());
        self.say("\r\nmonitor: help lists the commands, Ctrl-A c closes\r\n");
        self.say(PROMPT);
    }

    fn close(&mut self) {
        self.line = None;
        self.say("\r\n");
    }

    fn edit(&mut self, byte: u8) {
        const BACKSPACE: u8 = 0x08;
        const DELETE: u8 = 0x7f;
        const END_OF_INPUT: u8 = 0x04;
        const INTERRUPT: u8 = 0x03;
        let Some(line) = &mut self.line else { return };
        match byte {
            b'\r' | b'\n' => {
                let command = std::mem::take(line);
                self.say("\r\n");
                self.run(&command);
            }
            BACKSPACE | DELETE if line.pop().is_some() => self.say("\x08 \x08"),
            INTERRUPT => {
                line.clear();
                self.say("\r\n");
                self.say(PROMPT);
            }
            END_OF_INPUT => self.close(),
            b' '..=b'~' if line.len() < LONGEST_LINE => {
                line.push(char::from(byte));
                self.say(char::from(byte).encode_utf8(&mut [0; 4]));
            }
            _ => {}
        }
    }

    fn run(&mut self, command: &str) {
        match self.monitor.execute(command) {
            Next::Say(reply) => {
                for line in reply.lines() {
                    self.say(line);
                    self.say("\r\n");
                }
                self.say(PROMPT);
            }
            Next::Close => self.line = None,
        }
    }
}
