//! ACPI tables (ACPI 6.5 §5.2): a fixed-hardware machine without PCI.
//!
//! The FADT is not hardware-reduced: Linux skips its PIT and HPET
//! initialisation on machines that are.

use crate::layout::{ACPI_TABLES, HIGH_MEMORY, HPET_SIZE, IOAPIC, LAPIC, PIT_GSI, SCI_GSI};
use crate::memory::GuestMemory;
use crate::topology::Topology;
use acpi_tables::aml;
use acpi_tables::facs::FACS;
use acpi_tables::fadt::{FADTBuilder, Flags};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;
use acpi_tables::{Aml, AmlSink};
use devices::{pm, pvpanic, rtc, serial};
use vm_memory::{Bytes, GuestAddress};

/// Ports of the PM device's blocks.
const PM1_EVENT: u64 = pm::BASE + pm::PM1_EVT;
const PM1_CONTROL: u64 = pm::BASE + pm::PM1_CNT;
const PM_TIMER: u64 = pm::BASE + pm::PM_TMR;

const OEM_ID: [u8; 6] = *b"CLOCKS";
const OEM_TABLE_ID: [u8; 8] = *b"CLOCKVMM";
const OEM_REVISION: u32 = 1;
/// Longest table header: signature to creator revision (§5.2.6).
const SDT_HEADER: u32 = 36;
/// Entries for APIC ids from here on need the x2APIC structure (§5.2.12.12).
const FIRST_X2APIC_ID: u32 = 255;
/// `IAPC_BOOT_ARCH` bits (§5.2.9.3): legacy devices; there is no VGA to probe
/// and no MSI through PCI. A keyboard controller is not promised: nobody types
/// on it, it is there for its reset line.
const BOOT_ARCH_LEGACY_DEVICES: u16 = 1;
const BOOT_ARCH_NO_VGA: u16 = 1 << 2;

/// What the tables tell of.
#[derive(Debug, Clone, Copy)]
pub struct Machine {
    /// The vCPUs.
    pub topology: Topology,
    /// First word of the HPET's capability register, if there is an HPET.
    pub hpet_id: Option<u32>,
}

/// Writes all tables at [`ACPI_TABLES`], the RSDP first.
///
/// # Errors
/// Tables that outgrow their area, which [`HIGH_MEMORY`] ends.
pub fn write(memory: &GuestMemory, machine: &Machine) -> Result<(), String> {
    let mut area = Area { memory, next: ACPI_TABLES + 64 };
    let dsdt = area.place(&dsdt(machine))?;
    let facs = area.place(&bytes_of(&FACS::new()))?;
    let mut tables = vec![area.place(&fadt(dsdt, facs))?, area.place(&madt(&machine.topology))?];
    if let Some(id) = machine.hpet_id {
        tables.push(area.place(&hpet(id))?);
    }
    let mut xsdt = XSDT::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    for table in tables {
        xsdt.add_entry(table);
    }
    let xsdt = area.place(&bytes_of(&xsdt))?;
    area.next = ACPI_TABLES;
    area.place(&bytes_of(&Rsdp::new(OEM_ID, xsdt))).map(drop)
}

struct Area<'a> {
    memory: &'a GuestMemory,
    next: u64,
}

impl Area<'_> {
    fn place(&mut self, table: &[u8]) -> Result<u64, String> {
        let address = self.next;
        self.next = (address + table.len() as u64).next_multiple_of(64);
        if self.next > HIGH_MEMORY {
            return Err(format!("the ACPI tables outgrow {} bytes", HIGH_MEMORY - ACPI_TABLES));
        }
        self.memory.write_slice(table, GuestAddress(address)).map_err(|e| e.to_string())?;
        Ok(address)
    }
}

fn bytes_of(table: &dyn Aml) -> Vec<u8> {
    struct Sink(Vec<u8>);
    impl AmlSink for Sink {
        fn byte(&mut self, byte: u8) {
            self.0.push(byte);
        }
    }
    let mut sink = Sink(Vec::new());
    table.to_aml_bytes(&mut sink);
    sink.0
}

fn io(address: u64, bytes: u8) -> GAS {
    let access = match bytes {
        1 => AccessSize::ByteAccess,
        2 => AccessSize::WordAccess,
        _ => AccessSize::DwordAccess,
    };
    GAS::new(AddressSpace::SystemIo, bytes * 8, 0, access, address)
}

fn fadt(dsdt: u64, facs: u64) -> Vec<u8> {
    let mut t = FADTBuilder::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION)
        .dsdt_64(dsdt)
        .firmware_ctrl_32(facs as u32)
        .flag(Flags::Wbinvd)
        .flag(Flags::ProcC1)
        .flag(Flags::SlpButton)
        .flag(Flags::PwrButton)
        .flag(Flags::TmrValExt)
        .flag(Flags::ResetRegSup);
    // §5.2.9: the 32-bit fields too, for guests that read no other.
    t.dsdt = (dsdt as u32).into();
    t.sci_int = (SCI_GSI as u16).into();
    // SMI_CMD stays 0: the machine is in ACPI mode from the start.
    t.pm1a_evt_blk = (PM1_EVENT as u32).into();
    t.pm1_evt_len = 4;
    t.x_pm1a_evt_blk = io(PM1_EVENT, 4);
    t.pm1a_cnt_blk = (PM1_CONTROL as u32).into();
    t.pm1_cnt_len = 2;
    t.x_pm1a_cnt_blk = io(PM1_CONTROL, 2);
    t.pm_tmr_blk = (PM_TIMER as u32).into();
    t.pm_tmr_len = 4;
    t.x_pm_tmr_blk = io(PM_TIMER, 4);
    // No C2, no C3 (§5.2.9: more than 100 and 1000 µs say so).
    t.p_lvl2_lat = 0x0fff.into();
    t.p_lvl3_lat = 0x0fff.into();
    t.century = 0x32;
    t.iapc_boot_arch = (BOOT_ARCH_LEGACY_DEVICES | BOOT_ARCH_NO_VGA).into();
    t.reset_reg = io(pm::RESET_PORT, 1);
    t.reset_value = pm::RESET_VALUE;
    bytes_of(&t.finalize())
}

/// A table: the common header (§5.2.6) and `body`.
fn table(signature: &[u8; 4], revision: u8, body: &[u8]) -> Vec<u8> {
    let mut table = Sdt::new(*signature, SDT_HEADER, revision, OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    table.append_slice(body);
    table.as_slice().to_vec()
}

/// §5.2.12, written entry by entry: the crate lacks the x86 structures.
fn madt(topology: &Topology) -> Vec<u8> {
    const PCAT_COMPAT: u32 = 1;
    const ENABLED: u32 = 1;
    let mut body = Vec::new();
    let words = |body: &mut Vec<u8>, words: &[u32]| {
        body.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    };
    words(&mut body, &[LAPIC as u32, PCAT_COMPAT]);
    for index in 0..topology.cpus() as u32 {
        let id = topology.apic_id(index);
        if id < FIRST_X2APIC_ID {
            body.extend([0, 8, index as u8, id as u8]);
            words(&mut body, &[ENABLED]);
        } else {
            body.extend([9, 16, 0, 0]);
            words(&mut body, &[id, ENABLED, index]);
        }
    }
    body.extend([1, 12, 0, 0]);
    words(&mut body, &[IOAPIC as u32, 0]);
    // Bus ISA: IRQ 0 is on pin 2; the SCI is level-triggered, active high.
    for (irq, gsi, flags) in [(0, PIT_GSI, 0u8), (SCI_GSI as u8, SCI_GSI, 0xd)] {
        body.extend([2, 10, 0, irq]);
        words(&mut body, &[gsi]);
        body.extend([flags, 0]);
    }
    // NMI on LINT1 of every local APIC, by both kinds of structure.
    body.extend([4, 6, 0xff, 0, 0, 1]);
    body.extend([10, 12, 0, 0, 0xff, 0xff, 0xff, 0xff, 1, 0, 0, 0]);
    table(b"APIC", 5, &body)
}

/// IA-PC HPET 1.0a §3.2.4.
fn hpet(id: u32) -> Vec<u8> {
    let address =
        GAS::new(AddressSpace::SystemMemory, 64, 0, AccessSize::Undefined, devices::hpet::BASE);
    let mut body = id.to_le_bytes().to_vec();
    body.extend(bytes_of(&address));
    // HPET number 0, then the shortest periodic tick that loses no interrupt
    // (100 µs in counter ticks of 10 ns), then no page protection.
    const MINIMUM_TICK: u16 = 10_000;
    body.push(0);
    body.extend(MINIMUM_TICK.to_le_bytes());
    body.push(0);
    table(b"HPET", 1, &body)
}

/// Soft-off, and the devices that have no other way to be found.
fn dsdt(machine: &Machine) -> Vec<u8> {
    let device = |name: &str, id: &str, resources: Vec<&dyn Aml>| {
        bytes_of(&aml::Device::new(
            name.into(),
            vec![
                &aml::Name::new("_HID".into(), &aml::EISAName::new(id)),
                &aml::Name::new("_CRS".into(), &aml::ResourceTemplate::new(resources)),
            ],
        ))
    };
    let port = |address: u64, length| aml::IO::new(address as u16, address as u16, 1, length);
    let mut devices = device(
        "COM1",
        "PNP0501",
        vec![
            &port(serial::COM1_BASE, 8),
            &aml::Interrupt::new(true, true, false, false, serial::COM1_IRQ),
        ],
    );
    devices.extend(device("RTC_", "PNP0B00", vec![&port(rtc::BASE, 2)]));
    // Guests find pvpanic by this name, which is no EISA id.
    devices.extend(bytes_of(&aml::Device::new(
        "PEVT".into(),
        vec![
            &aml::Name::new("_HID".into(), &"QEMU0001"),
            &aml::Name::new(
                "_CRS".into(),
                &aml::ResourceTemplate::new(vec![&port(pvpanic::PORT, 1)]),
            ),
            // Present, enabled, functioning, not shown (ACPI 6.5 §6.3.7).
            &aml::Name::new("_STA".into(), &0x0b_u8),
        ],
    )));
    if machine.hpet_id.is_some() {
        let registers =
            aml::Memory32Fixed::new(false, devices::hpet::BASE as u32, HPET_SIZE as u32);
        devices.extend(device("HPET", "PNP0103", vec![&registers]));
    }
    let mut body = bytes_of(&aml::Name::new(
        "_S5_".into(),
        &aml::Package::new(vec![&pm::S5_SLEEP_TYPE, &pm::S5_SLEEP_TYPE, &aml::ZERO, &aml::ZERO]),
    ));
    body.extend(aml::Scope::raw("\\_SB_".into(), devices));
    table(b"DSDT", 2, &body)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(cpus: u32, hpet_id: Option<u32>) -> (GuestMemory, Result<(), String>) {
        let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 2 << 20)]).unwrap();
        let written = write(&memory, &Machine { topology: Topology::one_socket(cpus), hpet_id });
        (memory, written)
    }

    fn read(memory: &GuestMemory, address: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        memory.read_slice(&mut bytes, GuestAddress(address)).unwrap();
        bytes
    }

    fn table_at(memory: &GuestMemory, address: u64) -> Vec<u8> {
        let length: u32 = memory.read_obj(GuestAddress(address + 4)).unwrap();
        read(memory, address, length as usize)
    }

    #[test]
    fn every_table_is_reachable_and_sums_to_zero() {
        for (cpus, hpet, expected) in [(1, None, 2), (40, Some(0x8086_a201), 3), (1024, Some(1), 3)]
        {
            let (memory, written) = machine(cpus, hpet);
            written.unwrap();
            let rsdp = read(&memory, ACPI_TABLES, 36);
            assert_eq!(&rsdp[..8], b"RSD PTR ");
            let xsdt = u64::from_le_bytes(rsdp[24..32].try_into().unwrap());
            let xsdt = table_at(&memory, xsdt);
            let tables: Vec<_> = xsdt[36..]
                .chunks(8)
                .map(|a| table_at(&memory, u64::from_le_bytes(a.try_into().unwrap())))
                .collect();
            assert_eq!(tables.len(), expected);
            for table in tables.iter().chain([&xsdt]) {
                assert_eq!(table.iter().fold(0u8, |a, b| a.wrapping_add(*b)), 0);
            }
            let hpet_table = tables.iter().find(|t| &t[..4] == b"HPET");
            assert_eq!(hpet_table.map(|t| t.len()), hpet.map(|_| 56));
            let fadt = tables.iter().find(|t| &t[..4] == b"FACP").unwrap();
            const HW_REDUCED: u32 = 1 << 20;
            let flags = u32::from_le_bytes(fadt[112..116].try_into().unwrap());
            assert_eq!(flags & HW_REDUCED, 0);
        }
    }

    #[test]
    fn the_madt_tells_of_every_cpu_once() {
        for cpus in [1, 41, 254, 255, 256, 1024] {
            let madt = madt(&Topology::one_socket(cpus));
            let (mut at, mut ids) = (44, Vec::new());
            while at < madt.len() {
                match madt[at] {
                    0 => ids.push(u32::from(madt[at + 3])),
                    9 => ids.push(u32::from_le_bytes(madt[at + 4..at + 8].try_into().unwrap())),
                    _ => {}
                }
                at += usize::from(madt[at + 1]);
            }
            assert_eq!(ids, (0..cpus).collect::<Vec<_>>());
        }
    }
}
