//! `--debug-exit`: what the unit tests of hypervisors expect of their machine,
//! wired to this one.

use crate::console::Console;
use crate::ending::Ending;
use crate::lifecycle::Lifecycle;
use crate::memory::GuestMemory;
use devices::bus::{Device, Range};
use devices::debug_exit::{self, DebugConsole, DebugExit};
use devices::test_device::{self, FlushPage, IrqLines, Scratch};
use kvm_ioctls::VmFd;
use std::sync::Arc;
use vm_memory::{GuestAddress, GuestMemoryBackend};

/// The ports of the test device.
pub fn ports(
    vm: &Arc<VmFd>,
    memory: &GuestMemory,
    lifecycle: &Arc<Lifecycle>,
    console: &Console,
) -> Vec<Range> {
    let range = |name, base, len, device: Arc<dyn Device>| Range { name, base, len, device };
    let lifecycle = lifecycle.clone();
    let exit = DebugExit::new(Box::new(move |code| lifecycle.end(Ending::DebugExit(code))));
    let (vm, memory) = (vm.clone(), memory.clone());
    let lines = IrqLines::new(Box::new(move |line, high| {
        // KVM refuses a line without a route, and then nobody listens to it.
        let _ = vm.set_irq_line(line, high);
    }));
    let flush = FlushPage::new(Box::new(move |gpa| forget(&memory, gpa)));
    let register = test_device::REGISTER_LEN;
    let mut ports = vec![
        range("debug-exit", debug_exit::EXIT_PORT, debug_exit::EXIT_LEN, Arc::new(exit)),
        range("scratch", test_device::SCRATCH_PORT, register, Arc::new(Scratch::default())),
        range("flush", test_device::FLUSH_PORT, register, Arc::new(flush)),
        range("irq-lines", test_device::IRQ_PORT, test_device::IRQ_LINES, Arc::new(lines)),
    ];
    ports.extend(debug_exit::CONSOLE_PORTS.map(|port| {
        let device = DebugConsole::new(Box::new(console.writer()));
        range("debug-console", port, 1, Arc::new(device))
    }));
    ports
}

/// Makes KVM drop its mapping of the page at `gpa`, content kept: a change of
/// the host mapping's protection tells it to. There is no moment at which the
/// page could not be read or written, for other vCPUs use it meanwhile.
fn forget(memory: &GuestMemory, gpa: u64) {
    let page = GuestAddress(gpa & !0xfff);
    if !memory.check_range(page, 4096) {
        return;
    }
    let Ok(host) = memory.get_host_address(page) else { return };
    let usual = libc::PROT_READ | libc::PROT_WRITE;
    for protection in [usual | libc::PROT_EXEC, usual] {
        // SAFETY: the page is one of guest RAM's mapping, which `memory` keeps
        // alive, and stays readable and writable throughout. A refusal (a host
        // that forbids the first) changes nothing.
        unsafe { libc::mprotect(host.cast(), 4096, protection) };
    }
}
