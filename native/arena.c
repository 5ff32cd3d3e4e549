/* SPDX-License-Identifier: Apache-2.0
 * Arenas: reserved huge pages, else transparent ones, else plain pages; bound to a NUMA node and
 * faulted in at once. An arena lies between two guard pages, so that it is a mapping of its own
 * (in /proc/self/smaps too) and overruns are caught.
 */
#include "internal.h"
#include <errno.h>
#include <inttypes.h>
#include <numaif.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define FAULT_THREADS_MAX 8u
#define FAULT_BYTES_A_THREAD (UINT64_C(1) << 30)
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

/* ---- faulting in ---- */
struct fault {
    pthread_t thread;
    uint8_t *memory;
    uint64_t length;
    bool safe; /* only as MADV_POPULATE_WRITE, which fails where a touch would raise SIGBUS */
    int result;
};

static int populate(uint8_t *memory, uint64_t length) {
    int result;
    do {
        result = madvise(memory, length, MADV_POPULATE_WRITE) < 0 ? -errno : 0;
    } while (result == -EINTR || result == -EAGAIN);
    return result;
}

static void *fault_share(void *argument) {
    struct fault *fault = argument;
    fault->result = populate(fault->memory, fault->length);
    if (fault->result == -EINVAL && !fault->safe) { /* Linux before 5.14 */
        for (uint64_t i = 0; i < fault->length; i += KVIO_ALIGN)
            ((volatile uint8_t *)fault->memory)[i] = 0;
        fault->result = 0;
    }
    return NULL;
}

static uint32_t fault_threads(uint64_t length) {
    uint64_t count = 1 + length / FAULT_BYTES_A_THREAD;
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    count = count < FAULT_THREADS_MAX ? count : FAULT_THREADS_MAX;
    return processors > 0 && count > (uint64_t)processors ? (uint32_t)processors : (uint32_t)count;
}

static int fault_in(uint8_t *memory, uint64_t length, bool safe) {
    struct fault faults[FAULT_THREADS_MAX];
    uint32_t count = fault_threads(length), started = 0;
    uint64_t share = (length / count + HUGE_BYTES - 1) / HUGE_BYTES * HUGE_BYTES;
    for (uint64_t start = 0; start < length; start += share, started++) {
        struct fault *fault = &faults[started];
        uint64_t part = length - start < share ? length - start : share;
        *fault = (struct fault){.memory = memory + start, .length = part, .safe = safe};
        /* The last share, or one that gets no thread, is done here. */
        if (start + part == length ||
            thread_start(&fault->thread, "kvio-fault", fault_share, fault) < 0) {
            fault_share(fault);
            fault->thread = pthread_self();
        }
    }
    int result = 0;
    for (uint32_t i = 0; i < started; i++) {
        if (!pthread_equal(faults[i].thread, pthread_self()))
            pthread_join(faults[i].thread, NULL);
        result = faults[i].result < 0 ? faults[i].result : result;
    }
    return result;
}

/* ---- what the pages are ---- */
/* Share of the mapping at `memory`, in bytes: *reserved and *transparent. */
static int read_page_types(const void *memory, uint64_t *reserved, uint64_t *transparent) {
    FILE *maps = fopen("/proc/self/smaps", "re");
    if (!maps)
        return -errno;
    char line[256];
    bool ours = false;
    *reserved = *transparent = 0;
    while (fgets(line, sizeof line, maps)) {
        uint64_t start, end, kilobytes;
        if (sscanf(line, "%" SCNx64 "-%" SCNx64 " ", &start, &end) == 2)
            ours = start <= (uintptr_t)memory && (uintptr_t)memory < end;
        else if (ours && sscanf(line, "AnonHugePages: %" SCNu64, &kilobytes) == 1)
            *transparent += kilobytes << 10;
        else if (ours && sscanf(line, "Private_Hugetlb: %" SCNu64, &kilobytes) == 1)
            *reserved += kilobytes << 10;
    }
    fclose(maps);
    return 0;
}

static uint32_t page_type_of(const void *memory, uint64_t length) {
    uint64_t reserved, transparent, enough = length / 10 * 9;
    if (read_page_types(memory, &reserved, &transparent) < 0)
        return KVIO_PAGES_PLAIN;
    if (reserved >= enough)
        return KVIO_PAGES_RESERVED;
    return transparent >= enough ? KVIO_PAGES_TRANSPARENT : KVIO_PAGES_PLAIN;
}

/* ---- mapping ---- */
static int bind_memory(void *memory, uint64_t length, int32_t *numa_node) {
    unsigned long mask[16] = {0};
    const unsigned bits = 8 * sizeof mask[0];
    if (*numa_node < 0)
        return 0;
    if ((unsigned)*numa_node >= sizeof mask * 8 || !numa_node_exists(*numa_node))
        return -EINVAL;
    mask[(unsigned)*numa_node / bits] = 1ul << ((unsigned)*numa_node % bits);
    if (mbind(memory, length, MPOL_BIND, mask, sizeof mask * 8, 0) == 0)
        return 0;
    if (errno != EPERM && errno != ENOSYS) /* what a container without the right to bind says */
        return -errno;
    *numa_node = -1;
    return 0;
}

/* Whether plain memory of this size is there; past it, faulting in ends with the OOM killer. */
static bool memory_available(uint64_t length) {
    FILE *info = fopen("/proc/meminfo", "re");
    char line[128];
    uint64_t kilobytes = UINT64_MAX >> 10;
    while (info && fgets(line, sizeof line, info))
        if (sscanf(line, "MemAvailable: %" SCNu64, &kilobytes) == 1)
            break;
    if (info)
        fclose(info);
    return length >> 10 <= kilobytes;
}

/* Address space for `length` bytes, aligned to 2 MiB, with a page before and after. */
static uint8_t *reserve(uint64_t length) {
    uint64_t all = length + 2 * HUGE_BYTES;
    uint8_t *start = mmap(NULL, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED)
        return NULL;
    uintptr_t aligned = ((uintptr_t)start + KVIO_ALIGN + HUGE_BYTES - 1) / HUGE_BYTES * HUGE_BYTES;
    uint8_t *memory = start + (aligned - (uintptr_t)start), *end = start + all;
    if (memory - KVIO_ALIGN > start)
        munmap(start, (size_t)(memory - KVIO_ALIGN - start));
    if (end > memory + length + KVIO_ALIGN)
        munmap(memory + length + KVIO_ALIGN, (size_t)(end - (memory + length + KVIO_ALIGN)));
    return memory;
}

static int fill(uint8_t *memory, uint64_t length, int32_t *numa_node, int huge_flags) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | huge_flags;
    if (mmap(memory, length, PROT_READ | PROT_WRITE, flags, -1, 0) == MAP_FAILED)
        return -errno;
    int result = bind_memory(memory, length, numa_node);
    if (result < 0)
        return result;
    if (!huge_flags)
        (void)madvise(memory, length, MADV_HUGEPAGE); /* plain pages where there are none */
    return fault_in(memory, length, huge_flags != 0);
}

int kvio_arena_map(uint64_t length, int32_t numa_node, kvio_arena *arena) {
    if (!arena || length == 0 || length > UINT64_MAX / 4)
        return -EINVAL;
    if (numa_node >= 0 && !numa_node_exists(numa_node))
        return -EINVAL;
    length = (length + HUGE_BYTES - 1) / HUGE_BYTES * HUGE_BYTES;
    uint8_t *memory = reserve(length);
    if (!memory)
        return -ENOMEM;
    kvio_arena mapped = {.memory = memory, .length = length, .numa_node = numa_node};
    int result = fill(memory, length, &mapped.numa_node, MAP_HUGETLB | (21 << MAP_HUGE_SHIFT));
    if (result < 0) {
        mapped.numa_node = numa_node;
        result = memory_available(length) ? fill(memory, length, &mapped.numa_node, 0) : -ENOMEM;
    }
    if (result < 0) {
        kvio_arena_unmap(&mapped);
        return result;
    }
    mapped.page_type = page_type_of(memory, length);
    *arena = mapped;
    return 0;
}

int kvio_arena_unmap(kvio_arena *arena) {
    if (!arena || !arena->memory)
        return -EINVAL;
    uint8_t *memory = arena->memory;
    int result = munmap(memory, arena->length) < 0 ? -errno : 0;
    munmap(memory - KVIO_ALIGN, KVIO_ALIGN);
    munmap(memory + arena->length, KVIO_ALIGN);
    memset(arena, 0, sizeof *arena);
    return result;
}
