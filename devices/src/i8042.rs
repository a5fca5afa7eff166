//! The i8042 keyboard controller at ports 0x60 and 0x64, with nothing plugged in.
//!
//! Guests use it to reset the machine (command 0xFE) and probe it at boot. Every controller
//! command is answered at once, so a probe never waits; bytes for the absent keyboard and mouse
//! are dropped.
//!
//! Threats: resets the machine, which is its purpose. The state is a few bytes.

use std::sync::{Mutex, PoisonError};

use crate::Signal;
use crate::bus::Device;

/// First port: data at 0x60, status and commands at 0x64.
pub const BASE: u64 = 0x60;
/// Number of ports, those that belong to nobody or to the in-kernel PIT (0x61) included.
pub const LEN: u64 = 5;

const DATA: u64 = 0;
const COMMAND: u64 = 4;

/// Status: a byte waits at the data port.
const OUTPUT_FULL: u8 = 1 << 0;
/// Status: the controller passed its self-test.
const SYSTEM_FLAG: u8 = 1 << 2;
/// Status: the last write went to the command port.
const LAST_WAS_COMMAND: u8 = 1 << 3;
/// Status: the keyboard is not locked (Linux warns when it is).
const NOT_LOCKED: u8 = 1 << 4;
/// Configuration after reset: no interrupts, both ports off, self-test passed, translation.
const CONFIG_RESET: u8 = 0x74;
/// Output port: the processor runs, A20 is open.
const OUTPUT_PORT: u8 = 0x03;

/// Everything that a snapshot needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct I8042State {
    /// The configuration byte (command 0x20 reads it, 0x60 writes it).
    pub config: u8,
    /// What waits at the data port.
    pub output: Option<u8>,
    /// The command that takes the next byte written to the data port.
    pub wants_data: Option<u8>,
    /// Whether the last write was a command (status bit 3).
    pub last_was_command: bool,
}

/// The controller.
pub struct I8042 {
    state: Mutex<I8042State>,
    reset: Signal,
}

impl I8042 {
    /// A controller after power-on; `reset` is called when the guest asks for a reset.
    pub fn new(reset: Signal) -> Self {
        Self::from_state(
            I8042State {
                config: CONFIG_RESET,
                output: None,
                wants_data: None,
                last_was_command: false,
            },
            reset,
        )
    }

    /// A controller as [`I8042::state`] described it.
    pub fn from_state(state: I8042State, reset: Signal) -> Self {
        Self { state: Mutex::new(state), reset }
    }

    /// A copy of the registers.
    pub fn state(&self) -> I8042State {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl I8042State {
    fn status(&self) -> u8 {
        let mut status = NOT_LOCKED | self.config & SYSTEM_FLAG;
        if self.output.is_some() {
            status |= OUTPUT_FULL;
        }
        if self.last_was_command {
            status |= LAST_WAS_COMMAND;
        }
        status
    }

    /// Runs a controller command; true if the machine is to be reset.
    fn command(&mut self, command: u8) -> bool {
        self.last_was_command = true;
        self.wants_data = None;
        match command {
            0x20 => self.output = Some(self.config),
            // Write configuration, output port, keyboard loop, mouse loop, mouse.
            0x60 | 0xD1..=0xD4 => self.wants_data = Some(command),
            // Mouse port off and on, keyboard port off and on.
            0xA7 => self.config |= 1 << 5,
            0xA8 => self.config &= !(1 << 5),
            0xAD => self.config |= 1 << 4,
            0xAE => self.config &= !(1 << 4),
            // Mouse port test: its clock line is stuck low, there is no mouse.
            0xA9 => self.output = Some(0x01),
            0xAA => self.output = Some(0x55),
            0xAB => self.output = Some(0x00),
            0xC0 => self.output = Some(0x00),
            0xD0 => self.output = Some(OUTPUT_PORT),
            // 0xF0–0xFF pulse the output lines whose bit is clear; bit 0 is the reset line.
            0xF0..=0xFF => return command & 1 == 0,
            _ => {}
        }
        false
    }

    /// Takes a byte at the data port; true if the machine is to be reset.
    fn data(&mut self, byte: u8) -> bool {
        self.last_was_command = false;
        match self.wants_data.take() {
            Some(0x60) => self.config = byte,
            Some(0xD1) => return byte & 1 == 0,
            // Both loops answer without the mouse bit in the status: no mouse.
            Some(0xD2 | 0xD3) => self.output = Some(byte),
            _ => {}
        }
        false
    }
}

impl Device for I8042 {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        for (port, byte) in (offset..).zip(data) {
            *byte = match port {
                DATA => state.output.take().unwrap_or(0),
                COMMAND => state.status(),
                _ => 0xFF,
            };
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        for (port, &byte) in (offset..).zip(data) {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            let reset = match port {
                DATA => state.data(byte),
                COMMAND => state.command(byte),
                _ => false,
            };
            drop(state);
            if reset {
                (self.reset)();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn bench() -> (I8042, Arc<AtomicUsize>) {
        let resets = Arc::new(AtomicUsize::new(0));
        let counter = resets.clone();
        let device = I8042::new(Box::new(move || {
            counter.fetch_add(1, Ordering::Relaxed);
        }));
        (device, resets)
    }

    fn read(device: &I8042, port: u64) -> u8 {
        let mut byte = [0];
        device.read(port, &mut byte);
        byte[0]
    }

    /// Sends a command and returns its answer, which must be there at once.
    fn ask(device: &I8042, command: u8) -> u8 {
        device.write(COMMAND, &[command]);
        assert_ne!(read(device, COMMAND) & OUTPUT_FULL, 0, "no answer to {command:#x}");
        let answer = read(device, DATA);
        assert_eq!(read(device, COMMAND) & OUTPUT_FULL, 0);
        answer
    }

    #[test]
    fn command_fe_resets_and_its_neighbours_do_not() {
        let (device, resets) = bench();
        device.write(COMMAND, &[0xFF]);
        device.write(DATA, &[0xFE]);
        assert_eq!(resets.load(Ordering::Relaxed), 0);
        device.write(COMMAND, &[0xFE]);
        assert_eq!(resets.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn output_port_bit_0_resets() {
        let (device, resets) = bench();
        for (value, total) in [(0xDF, 0), (0xDE, 1)] {
            device.write(COMMAND, &[0xD1]);
            device.write(DATA, &[value]);
            assert_eq!(resets.load(Ordering::Relaxed), total);
        }
    }

    #[test]
    fn linux_probe_finds_a_controller_without_a_mouse() {
        let (device, _) = bench();
        // i8042_flush, controller self-test, then CTR read, written and read back.
        assert_eq!(read(&device, COMMAND), NOT_LOCKED | SYSTEM_FLAG);
        assert_eq!(ask(&device, 0xAA), 0x55);
        let config = ask(&device, 0x20);
        device.write(COMMAND, &[0x60]);
        device.write(DATA, &[config | 1]);
        assert_eq!(ask(&device, 0x20), config | 1);
        // The mouse loop echoes without the mouse bit, and the port test fails.
        device.write(COMMAND, &[0xD3]);
        device.write(DATA, &[0x5A]);
        assert_eq!(read(&device, COMMAND) & 0x21, OUTPUT_FULL);
        assert_eq!(read(&device, DATA), 0x5A);
        assert_eq!(ask(&device, 0xA9), 0x01);
        // The input buffer is never full: kb_wait returns at once.
        assert_eq!(read(&device, COMMAND) & 0x02, 0);
    }

    #[test]
    fn state_survives_a_round_trip() {
        let (device, _) = bench();
        device.write(COMMAND, &[0x20]);
        let copy = I8042::from_state(device.state(), Box::new(|| ()));
        assert_eq!(copy.state(), device.state());
        assert_eq!(read(&copy, DATA), CONFIG_RESET);
    }
}
