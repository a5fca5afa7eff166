//! `--debug-exit`: what the unit tests of hypervisors expect of their machine,
//! wired to this one.

use crate::console::Console;
use crate::ending::Ending;
use crate::lifecycle::Lifecycle;
use devices::bus::{Device, Range};
use devices::debug_exit::{self, DebugConsole, DebugExit};
use devices::test_device::{self, FlushPage, IoMemory, IrqLines, Scratch};
use kvm_ioctls::VmFd;
use std::sync::Arc;

/// The ports of the test device.
pub fn ports(vm: &Arc<VmFd>, lifecycle: &Arc<Lifecycle>, console: &Console) -> Vec<Range> {
    let range = |name, base, len, device: Arc<dyn Device>| Range { name, base, len, device };
    let lifecycle = lifecycle.clone();
    let exit = DebugExit::new(Box::new(move |code| lifecycle.end(Ending::DebugExit(code))));
    let vm = vm.clone();
    let lines = IrqLines::new(Box::new(move |line, high| {
        // KVM refuses a line without a route, and then nobody listens to it.
        let _ = vm.set_irq_line(line, high);
    }));
    let register = test_device::REGISTER_LEN;
    let mut ports = vec![
        range("debug-exit", debug_exit::EXIT_PORT, debug_exit::EXIT_LEN, Arc::new(exit)),
        range("scratch", test_device::SCRATCH_PORT, register, Arc::new(Scratch::default())),
        range("flush", test_device::FLUSH_PORT, register, Arc::new(FlushPage)),
        range("irq-lines", test_device::IRQ_PORT, test_device::IRQ_LINES, Arc::new(lines)),
    ];
    ports.extend(debug_exit::CONSOLE_PORTS.map(|port| {
        let device = DebugConsole::new(Box::new(console.writer()));
        range("debug-console", port, 1, Arc::new(device))
    }));
    ports
}

/// The memory of the test device.
pub fn memory() -> Range {
    let device = Arc::new(IoMemory::default());
    Range {
        name: "io-memory",
        base: test_device::MEMORY_BASE,
        len: test_device::MEMORY_LEN,
        device,
    }
}
