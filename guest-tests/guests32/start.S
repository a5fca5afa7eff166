// The way in for a Multiboot loader: a stack, then main(command line).
    .section .multiboot, "ax"
    .balign 4
    .long 0x1badb002, 3, -(0x1badb002 + 3)

    .text
    .global start
start:
    mov $stack_end, %esp
    // The first sign of life, before anything else runs: COM1's data port.
    mov $0x3f8, %dx
    mov $'!', %al
    out %al, %dx
    pushl 16(%ebx)
    call main
halt:
    cli
    hlt
    jmp halt

    .bss
    .balign 16
    .skip 16384
stack_end:
