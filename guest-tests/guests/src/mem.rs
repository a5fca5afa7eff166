//! The four functions that compiled code expects from a C library.

use core::arch::{asm, naked_asm};

/// C `memcpy`.
#[unsafe(naked)]
#[unsafe(no_mangle)]
unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, bytes: usize) -> *mut u8 {
    naked_asm!("mov rax, rdi", "mov rcx, rdx", "rep movsb", "ret")
}

/// C `memset`.
#[unsafe(naked)]
#[unsafe(no_mangle)]
unsafe extern "C" fn memset(to: *mut u8, value: i32, bytes: usize) -> *mut u8 {
    naked_asm!("mov r8, rdi", "mov eax, esi", "mov rcx, rdx", "rep stosb", "mov rax, r8", "ret")
}

/// C `memmove`.
#[unsafe(no_mangle)]
unsafe extern "C" fn memmove(to: *mut u8, from: *const u8, bytes: usize) -> *mut u8 {
    if (to as usize).wrapping_sub(from as usize) >= bytes {
        // SAFETY: forwards is safe unless `to` starts inside the source.
        return unsafe { memcpy(to, from, bytes) };
    }
    // SAFETY: the caller's ranges, copied backwards; DF is clear again afterwards.
    unsafe {
        asm!(
            "std", "rep movsb", "cld",
            inout("rdi") to.add(bytes).wrapping_sub(1) => _,
            inout("rsi") from.add(bytes).wrapping_sub(1) => _,
            inout("rcx") bytes => _,
        );
    }
    to
}

/// C `memcmp`.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcmp(a: *const u8, b: *const u8, bytes: usize) -> i32 {
    for index in 0..bytes {
        // SAFETY: both ranges are the caller's and hold `bytes` bytes. Volatile, so that the
        // compiler does not turn the loop into a call of this very function.
        let (x, y) = unsafe { (a.add(index).read_volatile(), b.add(index).read_volatile()) };
        if x != y {
            return i32::from(x) - i32::from(y);
        }
    }
    0
}

/// C `bcmp`.
#[unsafe(no_mangle)]
unsafe extern "C" fn bcmp(a: *const u8, b: *const u8, bytes: usize) -> i32 {
    // SAFETY: the same contract.
    unsafe { memcmp(a, b, bytes) }
}
