//! COM1: a 16550A at ports 0x3F8–0x3FF.
//!
//! The register model is vm-superio's. Added here: input with back-pressure, so that whoever
//! reads the terminal knows when to stop and when to go on.
//!
//! Threats: the guest may transmit without end (bounded by the sink, which must not block), never
//! read its input (64 bytes wait here, the rest stays with the sender), and write any register.

use std::cell::Cell;
use std::convert::Infallible;
use std::io::Write;
use std::sync::{Mutex, PoisonError};

use vm_superio::Trigger;
use vm_superio::serial::SerialEvents;
pub use vm_superio::serial::SerialState;

use crate::Signal;
use crate::bus::Device;

/// First port of COM1.
pub const COM1_BASE: u64 = 0x3F8;
/// Number of ports.
pub const LEN: u64 = 8;
/// The ISA interrupt of COM1.
pub const COM1_IRQ: u32 = 4;

/// Capacity of the receive FIFO in bytes.
const FIFO_LEN: usize = 64;
/// Modem control register.
const MCR: u8 = 4;
/// MCR bit 4: what is sent comes back, and nothing else is received.
const MCR_LOOPBACK: u8 = 1 << 4;

/// Remembers that the model wants an interrupt until the lock is released.
struct Raised(Cell<bool>);

impl Trigger for Raised {
    type E = Infallible;

    fn trigger(&self) -> Result<(), Infallible> {
        self.0.set(true);
        Ok(())
    }
}

/// Counts the bytes that the sink refused.
struct Lost(Cell<u64>);

impl SerialEvents for Lost {
    fn buffer_read(&self) {}

    fn out_byte(&self) {}

    fn tx_lost_byte(&self) {
        self.0.set(self.0.get().saturating_add(1));
    }

    fn in_buffer_empty(&self) {}
}

struct Uart {
    model: vm_superio::Serial<Raised, Lost, Box<dyn Write + Send>>,
    /// A sender was turned away and has not been called back.
    sender_waits: bool,
}

/// The serial port.
pub struct Serial {
    uart: Mutex<Uart>,
    interrupt: Signal,
    room: Signal,
}

impl Serial {
    /// A port after reset.
    ///
    /// `output` takes what the guest sends, one byte at a time, and must not block. `interrupt`
    /// pulses the port's interrupt line. `room` is called once after [`Serial::enqueue`] took
    /// less than it was given, when the guest has emptied its FIFO.
    pub fn new(output: Box<dyn Write + Send>, interrupt: Signal, room: Signal) -> Self {
        let model =
            vm_superio::Serial::with_events(Raised(Cell::new(false)), Lost(Cell::new(0)), output);
        Self { uart: Mutex::new(Uart { model, sender_waits: false }), interrupt, room }
    }

    /// Hands input to the guest; returns how many bytes the FIFO had room for.
    ///
    /// The rest is the caller's to keep and to offer again when `room` is called.
    pub fn enqueue(&self, bytes: &[u8]) -> usize {
        self.with(|uart| {
            // A full FIFO is an error to the model, and loopback takes nothing.
            let taken = uart.model.enqueue_raw_bytes(bytes).unwrap_or(0);
            uart.sender_waits |= taken < bytes.len();
            taken
        })
    }

    /// How many bytes of output the sink refused.
    pub fn lost_bytes(&self) -> u64 {
        self.with(|uart| uart.model.events().0.get())
    }

    /// The registers and the FIFO.
    pub fn state(&self) -> SerialState {
        self.with(|uart| uart.model.state())
    }

    /// Runs one access, then sends the signals that it gave rise to, with the lock released.
    fn with<T>(&self, access: impl FnOnce(&mut Uart) -> T) -> T {
        let mut uart = self.uart.lock().unwrap_or_else(PoisonError::into_inner);
        let result = access(&mut uart);
        let raised = uart.model.interrupt_evt().0.take();
        let called_back = uart.sender_waits
            && uart.model.fifo_capacity() == FIFO_LEN
            && uart.model.read(MCR) & MCR_LOOPBACK == 0;
        uart.sender_waits &= !called_back;
        drop(uart);

        if raised {
            (self.interrupt)();
        }
        if called_back {
            (self.room)();
        }
        result
    }
}

impl Device for Serial {
    // A wider access is as many byte accesses, as on the ISA bus.
    fn read(&self, offset: u64, data: &mut [u8]) {
        for (register, byte) in (offset as u8..).zip(data) {
            *byte = self.with(|uart| uart.model.read(register));
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        for (register, &byte) in (offset as u8..).zip(data) {
            // The only error left is a sink that refused a byte, which `Lost` has counted.
            let _ = self.with(|uart| uart.model.write(register, byte));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::testing::Sink;

    const DATA: u64 = 0;
    const IER: u64 = 1;
    const LSR: u64 = 5;

    struct Bench {
        serial: Serial,
        sent: Sink,
        interrupts: Arc<AtomicUsize>,
        calls: Arc<AtomicUsize>,
    }

    fn bench() -> Bench {
        let sent = Sink::default();
        let counter = || Arc::new(AtomicUsize::new(0));
        let (interrupts, calls) = (counter(), counter());
        let count = |counter: &Arc<AtomicUsize>| -> Signal {
            let counter = counter.clone();
            Box::new(move || {
                counter.fetch_add(1, Ordering::Relaxed);
            })
        };
        let serial = Serial::new(Box::new(sent.clone()), count(&interrupts), count(&calls));
        Bench { serial, sent, interrupts, calls }
    }

    fn read(serial: &Serial, register: u64) -> u8 {
        let mut byte = [0];
        serial.read(register, &mut byte);
        byte[0]
    }

    #[test]
    fn output_reaches_the_sink() {
        let bench = bench();
        bench.serial.write(DATA, b"h");
        bench.serial.write(DATA, b"i");
        assert_eq!(bench.sent.take(), b"hi");
        assert_eq!(bench.serial.lost_bytes(), 0);
    }

    #[test]
    fn refused_output_is_counted_and_does_not_stop_the_guest() {
        struct Full;
        impl Write for Full {
            fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
                Err(std::io::ErrorKind::WouldBlock.into())
            }

            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let serial = Serial::new(Box::new(Full), Box::new(|| ()), Box::new(|| ()));
        serial.write(DATA, b"x");
        serial.write(DATA, b"y");
        assert_eq!(serial.lost_bytes(), 2);
        assert_eq!(read(&serial, LSR) & 0x60, 0x60, "ready for more");
    }

    #[test]
    fn a_paste_of_64_kib_arrives_intact() {
        let bench = bench();
        bench.serial.write(IER, &[1]);
        let paste: Vec<u8> = (0..65536u32).map(|i| (i % 251) as u8).collect();
        let (mut offered, mut got, mut seen_calls) = (0, Vec::new(), 0);
        offered += bench.serial.enqueue(&paste);
        assert_eq!(offered, FIFO_LEN);
        while got.len() < paste.len() {
            assert_ne!(read(&bench.serial, LSR) & 1, 0, "stuck after {} bytes", got.len());
            while read(&bench.serial, LSR) & 1 != 0 {
                got.push(read(&bench.serial, DATA));
            }
            let calls = bench.calls.load(Ordering::Relaxed);
            if calls > seen_calls {
                assert_eq!(calls, seen_calls + 1, "one notice per drained FIFO");
                seen_calls = calls;
                offered += bench.serial.enqueue(&paste[offered..]);
            }
        }
        assert_eq!(got, paste);
        assert_eq!(bench.interrupts.load(Ordering::Relaxed), paste.len() / FIFO_LEN);
    }

    #[test]
    fn input_that_nobody_reads_stays_with_the_sender() {
        let bench = bench();
        assert_eq!(bench.serial.enqueue(&[0; 1000]), FIFO_LEN);
        for _ in 0..1000 {
            assert_eq!(bench.serial.enqueue(&[0; 1000]), 0);
        }
        assert_eq!(bench.calls.load(Ordering::Relaxed), 0);
        assert_eq!(bench.serial.state().in_buffer.len(), FIFO_LEN);
    }

    #[test]
    fn no_notice_without_a_sender_that_waits() {
        let bench = bench();
        assert_eq!(bench.serial.enqueue(b"ab"), 2);
        read(&bench.serial, DATA);
        read(&bench.serial, DATA);
        assert_eq!(bench.calls.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_sender_turned_away_by_loopback_is_called_when_it_ends() {
        let bench = bench();
        bench.serial.write(u64::from(MCR), &[MCR_LOOPBACK]);
        assert_eq!(bench.serial.enqueue(b"ab"), 0);
        read(&bench.serial, LSR);
        assert_eq!(bench.calls.load(Ordering::Relaxed), 0);
        bench.serial.write(u64::from(MCR), &[0]);
        assert_eq!(bench.calls.load(Ordering::Relaxed), 1);
        assert_eq!(bench.serial.enqueue(b"ab"), 2);
    }
}
