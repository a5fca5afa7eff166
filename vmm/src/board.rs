//! What is soldered on: the devices, their addresses and their lines.

use crate::console::Console;
use crate::ending::Ending;
use crate::error::{Error, Result};
use crate::lifecycle::Lifecycle;
use crate::marks::{FirstByte, Marks};
use crate::stats::{self, VcpuStats};
use crate::timeline::Timeline;
use devices::Signal;
use devices::bus::{Bus, Device, Range};
use devices::i8042::{self, I8042};
use devices::marks;
use devices::pm::{self, Pm, ResetPort};
use devices::pvpanic::{self, Pvpanic};
use devices::rtc::{self, Rtc};
use devices::serial::{self, Serial};
use kvm_ioctls::VmFd;
use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Builds a bus.
pub fn bus(ranges: Vec<Range>) -> Result<Bus> {
    Bus::new(ranges).map_err(|e| Error::new(e.to_string()))
}

/// The serial port, with its interrupt wired and its output on `console`.
pub fn serial_port(
    vm: &VmFd,
    console: &Console,
    room: &EventFd,
    marks: &Arc<Marks>,
) -> Result<Arc<Serial>> {
    let failed =
        |e: &dyn std::fmt::Display| Error::new(format!("cannot wire the serial port ({e})"));
    let line = EventFd::new(EFD_NONBLOCK).map_err(|e| failed(&e))?;
    vm.register_irqfd(&line, serial::COM1_IRQ).map_err(|e| failed(&e))?;
    let room = room.try_clone().map_err(|e| failed(&e))?;
    let ring = |fd: EventFd| -> Signal { Box::new(move || drop(fd.write(1))) };
    let output = FirstByte::new(console.writer(), marks.clone());
    Ok(Arc::new(Serial::new(Box::new(output), ring(line), ring(room))))
}

/// What answers on the port bus and on the memory bus.
pub fn buses(
    serial: &Arc<Serial>,
    lifecycle: &Arc<Lifecycle>,
    timeline: &Arc<Timeline>,
    marks: &Arc<Marks>,
    counted: &Arc<OnceLock<Arc<[VcpuStats]>>>,
) -> (Vec<Range>, Vec<Range>) {
    let end = |why: Ending| -> Signal {
        let lifecycle = lifecycle.clone();
        Box::new(move || lifecycle.end(why.clone()))
    };
    let range = |name, base, len, device: Arc<dyn Device>| Range { name, base, len, device };
    let pvpanic = {
        let lifecycle = lifecycle.clone();
        Pvpanic::new(Box::new(move |_| lifecycle.end(Ending::GuestPanic)))
    };
    let mark_port = {
        let (marks, counted) = (marks.clone(), counted.clone());
        marks::Marks::new(Box::new(move |byte| {
            let exits = counted.get().map(|vcpus| stats::totals(vcpus.iter()));
            marks.note(format!("guest {}", marks::name(byte)), exits);
        }))
    };
    let wall_clock = Box::new(|| {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        since.map_or(0, |d| d.as_secs() as i64)
    });
    let ports = vec![
        range("serial", serial::COM1_BASE, serial::LEN, serial.clone()),
        range("i8042", i8042::BASE, i8042::LEN, Arc::new(I8042::new(end(Ending::I8042Reset)))),
        range("rtc", rtc::BASE, rtc::LEN, Arc::new(Rtc::new(wall_clock))),
        range("pm", pm::BASE, pm::LEN, Arc::new(Pm::new(timeline.clone(), end(Ending::PowerOff)))),
        range("reset", pm::RESET_PORT, 1, Arc::new(ResetPort::new(end(Ending::AcpiReset)))),
        range("pvpanic", pvpanic::PORT, 1, Arc::new(pvpanic)),
        range("marks", marks::PORT, 1, Arc::new(mark_port)),
    ];
    (ports, vec![])
}
