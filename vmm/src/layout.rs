//! Where things are: guest-physical addresses and interrupt lines. A device's own
//! address stands beside the device, in the `devices` crate.
//!
//! ```text
//! 0000_0500  GDT                        000e_0000  ACPI tables (RSDP first)
//! 0000_7000  boot parameters            0010_0000  high memory: kernel, initrd
//! 0000_9000  identity page tables       c000_0000  hole: IOAPIC, HPET, LAPIC, TSS
//! 0002_0000  command line               1_0000_0000  memory above the hole
//! 0003_0000  PVH or Multiboot information
//! ```

/// Global descriptor table used until the guest loads its own.
pub const GDT: u64 = 0x500;
/// The zero page of the Linux boot protocol.
pub const BOOT_PARAMS: u64 = 0x7000;
/// Four-level tables that map the first 4 GiB one to one with 2 MiB pages.
pub const PAGE_TABLES: u64 = 0x9000;
/// The kernel command line; one page longer than any kernel's `cmdline_size`.
pub const CMDLINE: u64 = 0x2_0000;
/// Bytes between [`CMDLINE`] and [`BOOT_INFO`].
pub const CMDLINE_SPACE: u64 = 0x1_0000;
/// What a PVH or Multiboot kernel is told, in one page.
pub const BOOT_INFO: u64 = 0x3_0000;
/// End of conventional memory reported to the guest (extended BIOS data area).
pub const EBDA: u64 = 0x9_fc00;
/// ACPI tables, in the range that a guest scans for the RSDP (ACPI 6.5 §5.2.5.1).
pub const ACPI_TABLES: u64 = 0xe_0000;
/// First byte of high memory, and the end of the ACPI area.
pub const HIGH_MEMORY: u64 = 0x10_0000;
/// Start of the hole below 4 GiB in which memory-mapped devices live.
pub const HOLE_START: u64 = 0xc000_0000;
/// End of that hole.
pub const HOLE_END: u64 = 0x1_0000_0000;

/// I/O APIC registers (in KVM).
pub const IOAPIC: u64 = 0xfec0_0000;
/// Bytes of HPET registers (IA-PC HPET 1.0a §2.3.1).
pub const HPET_SIZE: u64 = 0x400;
/// Local APIC registers (in KVM).
pub const LAPIC: u64 = 0xfee0_0000;
/// Page that KVM needs for real mode on VMX hosts.
pub const IDENTITY_MAP: u64 = 0xfffb_c000;
/// Three pages that KVM needs for real mode on VMX hosts.
pub const KVM_TSS: usize = 0xfffb_d000;

/// I/O APIC pin of the PIT (ISA IRQ 0), and of HPET timer 0 in legacy
/// replacement mode.
pub const PIT_GSI: u32 = 2;
/// ACPI system control interrupt.
pub const SCI_GSI: u32 = 9;
/// Input pins of the I/O APIC.
pub const IOAPIC_PINS: u32 = 24;
