//! Kernel images made here: one small program in 32-bit and in 64-bit code, in
//! the wrappings that kernels come in, and everything about them changeable.
//!
//! The program prints its command line, its module if it is given one, and a
//! letter for each part of the test device that works, and exits with code 5.

use std::arch::global_asm;

/// The program's text: positions are relative, so it runs wherever it lies. It
/// is assembled once for either mode.
macro_rules! program {
    ($name:literal, $code:literal) => {
        global_asm!(
            ".pushsection .rodata",
            $code,
            concat!(".global ", $name, "_start, ", $name, "_end"),
            concat!($name, "_start:"),
            "  xor ebp, ebp", // the module's bounds: ebp..edi
            "  xor edi, edi",
            "  cmp eax, 0x2badb002",
            "  je 1f",
            "  test ebx, ebx",
            "  jz 2f",
            "  cmp dword ptr [ebx], 0x336ec578",
            "  jne 9f",
            "  mov ecx, [ebx + 24]", // PVH: cmdline_paddr
            "  jmp 3f",
            "1:",
            "  mov ecx, [ebx + 16]", // Multiboot: cmdline
            "  test dword ptr [ebx], 8",
            "  jz 3f",
            "  mov eax, [ebx + 24]", // mods_addr
            "  mov ebp, [eax]",
            "  mov edi, [eax + 4]",
            "  jmp 3f",
            "2:",
            "  mov ecx, [esi + 0x228]", // Linux: cmd_line_ptr
            "3:",
            "  mov al, [ecx]",
            "  test al, al",
            "  jz 4f",
            "  out 0xe9, al",
            "  add ecx, 1",
            "  jmp 3b",
            "4:",
            "  mov al, 0x7c", // |
            "  out 0xe9, al",
            "5:",
            "  cmp ebp, edi",
            "  jae 6f",
            "  mov al, [ebp]",
            "  out 0xe8, al",
            "  add ebp, 1",
            "  jmp 5b",
            "6:",
            "  mov dx, 0x2005", // line 5 up, seen in the PIC's IRR
            "  mov al, 1",
            "  out dx, al",
            "  mov al, 0x0a",
            "  out 0x20, al",
            "  in al, 0x20",
            "  test al, 0x20",
            "  jz 7f",
            "  mov al, 0x69", // i
            "  out 0xe9, al",
            "7:",
            "  mov eax, 0x12345678", // scratch register
            "  out 0xe0, eax",
            "  xor eax, eax",
            "  in eax, 0xe0",
            "  cmp eax, 0x12345678",
            "  jne 8f",
            "  mov al, 0x73", // s
            "  out 0xe9, al",
            "8:",
            "  mov ecx, 0x200000", // a page keeps its content when flushed
            "  mov [ecx], ecx",
            "  mov eax, ecx",
            "  out 0xe4, eax",
            "  cmp [ecx], ecx",
            "  jne 9f",
            "  mov al, 0x66", // f
            "  out 0xe9, al",
            "  mov ecx, 0xff000000", // memory of the test device
            "  mov [ecx], ecx",
            "  cmp word ptr [ecx + 2], 0xff00",
            "  jne 9f",
            "  mov al, 0x6d", // m
            "  out 0xe9, al",
            "  mov eax, 5",
            "  out 0xf4, eax",
            "9:",
            "  hlt",
            "  jmp 9b",
            concat!($name, "_end:"),
            ".code64",
            ".popsection",
        );
    };
}
program!("program32", ".code32");
program!("program64", ".code64");

unsafe extern "C" {
    static program32_start: u8;
    static program32_end: u8;
    static program64_start: u8;
    static program64_end: u8;
}

/// The program in 64-bit or in 32-bit code.
pub fn program(long: bool) -> Vec<u8> {
    let (start, end) = match long {
        true => (&raw const program64_start, &raw const program64_end),
        false => (&raw const program32_start, &raw const program32_end),
    };
    // SAFETY: both labels lie in one section, the second behind the first, and
    // everything between them is initialised and never written.
    unsafe { std::slice::from_raw_parts(start, end.offset_from_unsigned(start)) }.to_vec()
}

/// A program header.
#[derive(Clone)]
pub struct Segment {
    pub kind: u32,
    pub address: u64,
    /// Claims these sizes; by default those of `bytes`.
    pub filesz: Option<u64>,
    pub memsz: Option<u64>,
    pub bytes: Vec<u8>,
}

impl Segment {
    pub fn load(address: u64, bytes: Vec<u8>) -> Self {
        Self { kind: 1, address, filesz: None, memsz: None, bytes }
    }

    /// PT_NOTE with Xen's PHYS32_ENTRY.
    pub fn pvh(entry: u32) -> Self {
        let mut bytes: Vec<u8> = [4u32, 4, 18].iter().flat_map(|w| w.to_le_bytes()).collect();
        bytes.extend(b"Xen\0");
        bytes.extend(entry.to_le_bytes());
        Self { kind: 4, address: 0, filesz: None, memsz: None, bytes }
    }
}

/// Where the images here are linked to.
pub const BASE: u64 = 0x40_0000;

/// A Multiboot header with these flags.
pub fn multiboot_header(flags: u32) -> Vec<u8> {
    const MAGIC: u32 = 0x1bad_b002;
    let checksum = 0u32.wrapping_sub(MAGIC).wrapping_sub(flags);
    [MAGIC, flags, checksum].iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// An ELF file of these segments.
pub fn elf(long: bool, entry: u64, segments: &[Segment]) -> Vec<u8> {
    let (header, each) = if long { (64, 56) } else { (52, 32) };
    let mut file = vec![0u8; header + each * segments.len()];
    file[..7].copy_from_slice(&[0x7f, b'E', b'L', b'F', if long { 2 } else { 1 }, 1, 1]);
    put(&mut file, 16, 2, 2); // ET_EXEC
    put(&mut file, 18, 2, if long { 62 } else { 3 });
    put(&mut file, 20, 4, 1);
    let word = if long { 8 } else { 4 };
    put(&mut file, 24, word, entry);
    put(&mut file, 24 + word, word, header as u64);
    let sizes = 24 + 3 * word + 4;
    put(&mut file, sizes, 2, header as u64);
    put(&mut file, sizes + 2, 2, each as u64);
    put(&mut file, sizes + 4, 2, segments.len() as u64);
    for (i, segment) in segments.iter().enumerate() {
        // The Multiboot header must be on a multiple of 4.
        file.resize(file.len().next_multiple_of(16), 0);
        let (at, offset) = (header + each * i, file.len() as u64);
        let filesz = segment.filesz.unwrap_or(segment.bytes.len() as u64);
        let memsz = segment.memsz.unwrap_or(filesz);
        put(&mut file, at, 4, segment.kind.into());
        let fields = [offset, segment.address, segment.address, filesz, memsz];
        // ELF64 has the flags before these, ELF32 behind them.
        let first = if long { at + 8 } else { at + 4 };
        for (n, field) in fields.into_iter().enumerate() {
            put(&mut file, first + word * n, word, field);
        }
        put(&mut file, if long { at + 48 } else { at + 28 }, word, 4);
        file.extend(&segment.bytes);
    }
    file
}

/// Writes a little-endian number of `size` bytes.
pub fn put(file: &mut [u8], at: usize, size: usize, value: u64) {
    file[at..at + size].copy_from_slice(&value.to_le_bytes()[..size]);
}

/// An ELF32 image with a Multiboot header, the program behind it.
pub fn multiboot() -> Vec<u8> {
    let mut bytes = multiboot_header(3);
    bytes.extend(program(false));
    elf(false, BASE + 12, &[Segment::load(BASE, bytes)])
}

/// An ELF image with a PVH note, of either class; its own entry would halt.
pub fn pvh(long: bool) -> Vec<u8> {
    let mut bytes = vec![0xf4];
    bytes.extend(program(false));
    elf(long, BASE, &[Segment::load(BASE, bytes), Segment::pvh(BASE as u32 + 1)])
}

/// An ELF64 image entered like Linux.
pub fn linux64() -> Vec<u8> {
    elf(true, BASE, &[Segment::load(BASE, program(true))])
}

/// What a vmlinux for the payload of [`bzimage`] is.
pub fn vmlinux(long: bool) -> Vec<u8> {
    elf(long, BASE, &[Segment::load(BASE, program(long))])
}

/// A bzImage of protocol 2.15 that needs 1 MiB, with this payload; its own code
/// is the program.
pub fn bzimage(long: bool, payload: &[u8]) -> Vec<u8> {
    const SETUP: usize = 5 * 512;
    let mut code = if long { vec![0x90; 0x200] } else { vec![] };
    code.extend(program(long));
    let payload_offset = code.len();
    code.extend(payload);
    code.resize(code.len().next_multiple_of(16), 0);
    let mut image = vec![0u8; SETUP];
    image.extend(&code);
    for (at, size, value) in [
        (0x1f1, 1, 4),                      // setup_sects
        (0x1f4, 4, code.len() as u64 / 16), // syssize
        (0x206, 2, 0x020f),                 // version
        (0x211, 1, 1),                      // loadflags: LOADED_HIGH
        (0x214, 4, 0x10_0000),              // code32_start
        (0x22c, 4, 0x7fff_ffff),            // initrd_addr_max
        (0x230, 4, 0x20_0000),              // kernel_alignment
        (0x234, 1, 1),                      // relocatable_kernel
        (0x236, 2, u64::from(long)),        // xloadflags
        (0x238, 4, 255),                    // cmdline_size
        (0x248, 4, payload_offset as u64),  // payload_offset
        (0x24c, 4, payload.len() as u64),   // payload_length
        (0x258, 8, 0x100_0000),             // pref_address
        (0x260, 4, 1 << 20),                // init_size
    ] {
        put(&mut image, at, size, value);
    }
    image[0x202..0x206].copy_from_slice(b"HdrS");
    image
}

/// `bytes` as Linux's build compresses them with gzip.
pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    use std::io::Write;
    let mut writer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    writer.write_all(bytes).expect("memory");
    writer.finish().expect("memory")
}
