// The /init of 32-bit Linux guests: what one clock read costs a 32-bit program,
// by the method of the 64-bit one (guest-tests/init/src/clock_cost.rs), for every
// clocksource; then power-off. In C, because Rust has no 32-bit target here.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/io.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <time.h>
#include <unistd.h>

#define SYSFS "/sys/devices/system/clocksource/clocksource0/"
#define MARKS 0x5f0
#define MAX_COUNT 1000
#define MAX_BATCHES 1000
#define MIN_BATCHES 8
#define BUDGET_MS 500

static uint64_t tsc(void)
{
    uint64_t value;
    asm volatile("lfence; rdtsc" : "=A"(value) : : "memory");
    return value;
}

static uint64_t batch(unsigned count)
{
    struct timespec now;
    uint64_t start = tsc();
    for (unsigned i = 0; i < count; i++)
        clock_gettime(CLOCK_REALTIME, &now);
    return tsc() - start;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void mark(uint8_t number)
{
    if (ioperm(MARKS, 1, 1) == 0)
        outb(number, MARKS);
}

static void read_line(const char *path, char *line, int size)
{
    FILE *file = fopen(path, "r");
    line[0] = 0;
    if (file) {
        if (!fgets(line, size, file))
            line[0] = 0;
        line[strcspn(line, "\n")] = 0;
        fclose(file);
    }
}

static double measure_hz(void)
{
    struct timespec from, to;
    clock_gettime(CLOCK_MONOTONIC, &from);
    uint64_t start = tsc();
    do
        clock_gettime(CLOCK_MONOTONIC, &to);
    while ((to.tv_sec - from.tv_sec) * 1e9 + (to.tv_nsec - from.tv_nsec) < 1e8);
    uint64_t cycles = tsc() - start;
    return cycles / ((to.tv_sec - from.tv_sec) + (to.tv_nsec - from.tv_nsec) / 1e9);
}

static void measure(const char *name, uint8_t first_mark, double hz)
{
    static double per_read[MAX_BATCHES];
    uint64_t budget = hz * BUDGET_MS / 1e3, reads = 0;
    unsigned count = 1;
    int batches = 0;

    mark(first_mark);
    uint64_t start = tsc();
    for (; count < MAX_COUNT; count = count * 2 > MAX_COUNT ? MAX_COUNT : count * 2) {
        reads += count;
        if (batch(count) >= budget / 256)
            break;
    }
    while (batches < MIN_BATCHES || (batches < MAX_BATCHES && tsc() - start < budget)) {
        reads += count;
        per_read[batches++] = (double)batch(count) / count;
    }
    mark(first_mark + 1);
    qsort(per_read, batches, sizeof *per_read, ascending);
    double p50 = per_read[batches / 2];
    printf("@result {\"job\":\"clock-cost\",\"clock\":\"%s\",\"where\":\"guest-user\","
           "\"cycles_p50\":%.2f,\"cycles_min\":%.2f,\"cycles_max\":%.2f,\"ns_p50\":%.2f,"
           "\"samples\":%d,\"count\":%u,\"reads\":%llu,\"first_mark\":%u}\n",
           name, p50, per_read[0], per_read[batches - 1], p50 / hz * 1e9, batches, count,
           (unsigned long long)reads, first_mark);
}

int main(void)
{
    char original[64], available[256], now[64];
    mount("sysfs", "/sys", "sysfs", 0, NULL);
    read_line(SYSFS "current_clocksource", original, sizeof original);
    read_line(SYSFS "available_clocksource", available, sizeof available);
    printf("@result {\"job\":\"clocksource\",\"bits\":%zu,\"current\":\"%s\","
           "\"available\":\"%s\"}\n",
           8 * sizeof(void *), original, available);
    double hz = measure_hz();
    uint8_t first_mark = 0;
    for (char *name = strtok(available, " "); name; name = strtok(NULL, " ")) {
        FILE *file = fopen(SYSFS "current_clocksource", "w");
        if (file) {
            fputs(name, file);
            fclose(file);
        }
        read_line(SYSFS "current_clocksource", now, sizeof now);
        if (strcmp(now, name) == 0)
            measure(name, first_mark, hz);
        else
            printf("@result {\"job\":\"clock-cost\",\"error\":\"%s cannot be chosen\"}\n", name);
        first_mark += 2;
    }
    fflush(stdout);
    // The console is an emulated serial port; let it take all before the end.
    usleep(300000);
    reboot(RB_POWER_OFF);
    return 1;
}
