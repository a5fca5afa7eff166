// What one read of each clock costs in a 32-bit kernel: ordered RDTSC, `reads`
// reads, ordered RDTSC, divide; p50, min and max over `batches` batches.
//
// Runs in ring 0 under any Multiboot loader. The command line has the words
// `reads=N` (1..1000), `batches=N` (1..99), and `wait`, which halts after the
// first byte of output instead.
#include <stdint.h>

#define COM1 0x3f8
#define LINE_STATUS (COM1 + 5)
#define DEBUG_EXIT 0xf4
#define PM1_CONTROL 0x604
#define PM_TIMER 0x608
#define HPET 0xfed00000u
#define MSR_GUEST_OS_ID 0x40000000u
#define MSR_TIME_REF_COUNT 0x40000020u
#define MSR_REFERENCE_TSC 0x40000021u
#define MOST_BATCHES 99

static inline void out8(uint16_t port, uint8_t value)
{
    asm volatile("outb %0, %1" : : "a"(value), "d"(port));
}

static inline void out16(uint16_t port, uint16_t value)
{
    asm volatile("outw %0, %1" : : "a"(value), "d"(port));
}

static inline void out32(uint16_t port, uint32_t value)
{
    asm volatile("outl %0, %1" : : "a"(value), "d"(port));
}

static inline uint8_t in8(uint16_t port)
{
    uint8_t value;
    asm volatile("inb %1, %0" : "=a"(value) : "d"(port));
    return value;
}

static inline uint32_t in32(uint16_t port)
{
    uint32_t value;
    asm volatile("inl %1, %0" : "=a"(value) : "d"(port));
    return value;
}

static inline uint64_t rdmsr(uint32_t msr)
{
    uint64_t value;
    asm volatile("rdmsr" : "=A"(value) : "c"(msr));
    return value;
}

static inline void wrmsr(uint32_t msr, uint64_t value)
{
    asm volatile("wrmsr" : : "A"(value), "c"(msr));
}

static inline uint64_t rdtsc(void)
{
    uint64_t value;
    asm volatile("rdtsc" : "=A"(value));
    return value;
}

static inline uint64_t rdtsc_ordered(void)
{
    asm volatile("lfence" ::: "memory");
    return rdtsc();
}

static void cpuid(uint32_t leaf, uint32_t *a, uint32_t *b, uint32_t *c, uint32_t *d)
{
    asm volatile("cpuid" : "=a"(*a), "=b"(*b), "=c"(*c), "=d"(*d) : "a"(leaf), "c"(0));
}

static void put(const char *text)
{
    for (; *text; text++)
        out8(COM1, *text);
}

static void put_number(uint32_t value)
{
    char digits[11];
    int at = 10;
    digits[at] = 0;
    do
        digits[--at] = '0' + value % 10;
    while (value /= 10);
    put(digits + at);
}

// A number of hundredths, with two decimals.
static void put_hundredths(uint32_t value)
{
    put_number(value / 100);
    out8(COM1, '.');
    out8(COM1, '0' + value / 10 % 10);
    out8(COM1, '0' + value % 10);
}

// The reference TSC page (TLFS 12.7.2), written by the hypervisor.
static volatile struct {
    uint32_t sequence, reserved;
    uint64_t scale;
    int64_t offset;
} __attribute__((aligned(4096))) page[1];

// The upper half of a 64 by 64 multiplication, from the 32-bit ones that there are.
static inline uint64_t multiply_high(uint64_t a, uint64_t b)
{
    uint32_t a0 = a, a1 = a >> 32, b0 = b, b1 = b >> 32;
    uint64_t low = (uint64_t)a0 * b0, m1 = (uint64_t)a1 * b0, m2 = (uint64_t)a0 * b1;
    uint64_t middle = (low >> 32) + (uint32_t)m1 + (uint32_t)m2;
    return (uint64_t)a1 * b1 + (m1 >> 32) + (m2 >> 32) + (middle >> 32);
}

static uint64_t read_page(void)
{
    uint32_t sequence;
    uint64_t scale, tsc;
    int64_t offset;
    do {
        sequence = page->sequence;
        if (!sequence)
            return rdmsr(MSR_TIME_REF_COUNT);
        asm volatile("" ::: "memory");
        scale = page->scale;
        offset = page->offset;
        tsc = rdtsc_ordered();
        asm volatile("" ::: "memory");
    } while (page->sequence != sequence);
    return multiply_high(tsc, scale) + offset;
}

static volatile uint64_t sink;

static uint32_t reads = 1000, batches = 9;
static uint8_t next_mark;

static void mark(void)
{
    out8(0x5f0, next_mark++);
}

// Measures one clock. `read` is expanded in place: no call is in the figure.
#define MEASURE(clock, read)                                        \
    do {                                                            \
        uint32_t cost[MOST_BATCHES];                                \
        mark();                                                     \
        for (uint32_t batch = 0; batch <= batches; batch++) {       \
            uint64_t start = rdtsc_ordered();                       \
            for (uint32_t n = reads; n; n--)                        \
                sink = (read);                                      \
            uint64_t cycles = rdtsc_ordered() - start;              \
            if (batch) /* the first warms up */                     \
                cost[batch - 1] = per_read(cycles);                 \
        }                                                           \
        mark();                                                     \
        report(clock, cost);                                        \
    } while (0)

// Hundredths of a cycle, capped at what 32 bits hold.
static uint32_t per_read(uint64_t cycles)
{
    if (cycles >> 32)
        cycles = UINT32_MAX;
    uint32_t whole = (uint32_t)cycles / reads, rest = (uint32_t)cycles % reads;
    return whole > UINT32_MAX / 100 - 1 ? UINT32_MAX : whole * 100 + rest * 100 / reads;
}

static void report(const char *clock, uint32_t *cost)
{
    for (uint32_t i = 1; i < batches; i++)
        for (uint32_t j = i; j && cost[j - 1] > cost[j]; j--) {
            uint32_t swap = cost[j];
            cost[j] = cost[j - 1];
            cost[j - 1] = swap;
        }
    put("@result {\"guest\":\"clock-cost-i386\",\"clock\":\"");
    put(clock);
    put("\",\"where\":\"guest-kernel\",\"reads_per_batch\":");
    put_number(reads);
    put(",\"batches\":");
    put_number(batches);
    put(",\"cycles_p50\":");
    put_hundredths(cost[batches / 2]);
    put(",\"cycles_min\":");
    put_hundredths(cost[0]);
    put(",\"cycles_max\":");
    put_hundredths(cost[batches - 1]);
    put(",\"reads\":");
    put_number(reads * (batches + 1));
    put(",\"first_mark\":");
    put_number((uint8_t)(next_mark - 2));
    put("}\n");
}

// The value of `name=` on the command line, else `otherwise`; within 1..most.
static uint32_t word(const char *line, const char *name, uint32_t otherwise, uint32_t most)
{
    for (; *line; line++) {
        const char *l = line, *n = name;
        while (*n && *l == *n)
            l++, n++;
        if (*n)
            continue;
        uint32_t value = 0;
        for (; *l >= '0' && *l <= '9' && value <= most; l++)
            value = value * 10 + (*l - '0');
        return value < 1 ? 1 : value > most ? most : value;
    }
    return otherwise;
}

void main(const char *line)
{
    if (word(line, "wait", 0, 1))
        return;
    put("\n");
    reads = word(line, "reads=", reads, 1000);
    batches = word(line, "batches=", batches, MOST_BATCHES);

    MEASURE("tsc", rdtsc());
    MEASURE("pio", in8(LINE_STATUS));
    volatile uint32_t *hpet = (volatile uint32_t *)HPET;
    if (hpet[1] && hpet[1] <= 0x05f5e100) {
        hpet[4] |= 1;
        MEASURE("hpet", hpet[0xf0 / 4]);
    }
    if (in32(PM_TIMER) != UINT32_MAX)
        MEASURE("acpi_pm", in32(PM_TIMER));

    uint32_t a, b, c, d, most;
    cpuid(0x40000000, &most, &b, &c, &d);
    cpuid(0x40000003, &a, &b, &c, &d);
    // "Hv#1" and its clock: the counter (bit 1), the page (bit 9).
    uint32_t features = a, interface;
    cpuid(0x40000001, &interface, &b, &c, &d);
    if (most >= 0x40000003 && interface == 0x31237648) {
        wrmsr(MSR_GUEST_OS_ID, 1);
        if (features & 1 << 1)
            MEASURE("msr", rdmsr(MSR_TIME_REF_COUNT));
        if (features & 1 << 9) {
            wrmsr(MSR_REFERENCE_TSC, (uint32_t)page | 1);
            if (page->sequence) {
                MEASURE("page", read_page());
                uint32_t wrong = 0;
                for (int i = 0; i < 200; i++) {
                    uint64_t before = read_page(), msr = rdmsr(MSR_TIME_REF_COUNT);
                    wrong += !(before <= msr && msr <= read_page());
                }
                put("@result {\"guest\":\"clock-cost-i386\",\"check\":\"page<=msr<=page\","
                    "\"pairs\":200,\"wrong\":");
                put_number(wrong);
                put("}\n");
            }
        }
    }
    // A unit test's exit where there is one, else soft-off.
    out32(DEBUG_EXIT, 0);
    out16(PM1_CONTROL, 5 << 10 | 1 << 13);
}
