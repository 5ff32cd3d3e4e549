/* SPDX-License-Identifier: Apache-2.0
 * Arenas: reserved huge pages, else transparent ones, else plain pages; bound to a NUMA node and
 * faulted in at once. One of ordinary memory lies between two guard pages, so that it is a mapping
 * of its own (in /proc/self/smaps too) and overruns are caught.
 *
 * Never MAP_FIXED: where it fails, what lay there may be gone, and another thread's mapping may
 * have taken the place by the time that one tries again.
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
/* Bytes of transparent huge pages in the mapping at `memory`. */
static int read_transparent_bytes(const void *memory, uint64_t *bytes) {
    FILE *maps = fopen("/proc/self/smaps", "re");
    if (!maps)
        return -errno;
    char line[256];
    bool ours = false;
    *bytes = 0;
    while (fgets(line, sizeof line, maps)) {
        uint64_t start, end, kilobytes;
        if (sscanf(line, "%" SCNx64 "-%" SCNx64 " ", &start, &end) == 2)
            ours = start <= (uintptr_t)memory && (uintptr_t)memory < end;
        else if (ours && sscanf(line, "AnonHugePages: %" SCNu64, &kilobytes) == 1)
            *bytes += kilobytes << 10;
    }
    fclose(maps);
    return 0;
}

static uint32_t page_type_of(const void *memory, uint64_t length) {
    uint64_t transparent;
    if (read_transparent_bytes(memory, &transparent) < 0)
        return KVIO_PAGES_PLAIN;
    return transparent >= length / 10 * 9 ? KVIO_PAGES_TRANSPARENT : KVIO_PAGES_PLAIN;
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

static int populate_on(uint8_t *memory, uint64_t length, int32_t *numa_node, bool safe) {
    int result = bind_memory(memory, length, numa_node);
    return result < 0 ? result : fault_in(memory, length, safe);
}

static int map_reserved(uint64_t length, kvio_arena *arena) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | (21 << MAP_HUGE_SHIFT);
    uint8_t *memory = mmap(NULL, length, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (memory == MAP_FAILED)
        return -errno;
    *arena = (kvio_arena){memory, length, KVIO_PAGES_RESERVED, arena->numa_node};
    return populate_on(memory, length, &arena->numa_node, true);
}

/* Address space for `length` bytes, aligned to 2 MiB, with a page before and after. */
static uint8_t *reserve(uint64_t length) {
    uint64_t all = length + 2 * HUGE_BYTES;
    uint8_t *start = mmap(NULL, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
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

static int map_guarded(uint64_t length, kvio_arena *arena) {
    uint8_t *memory = memory_available(length) ? reserve(length) : NULL;
    if (!memory)
        return -ENOMEM;
    *arena = (kvio_arena){memory, length, KVIO_PAGES_PLAIN, arena->numa_node};
    if (mprotect(memory, length, PROT_READ | PROT_WRITE) < 0)
        return -errno;
    (void)madvise(memory, length, MADV_HUGEPAGE); /* plain pages where there are none */
    int result = populate_on(memory, length, &arena->numa_node, false);
    arena->page_type = page_type_of(memory, length);
    return result;
}

static int map_with(int (*map)(uint64_t, kvio_arena *), uint64_t length, kvio_arena *arena) {
    int result = map(length, arena);
    if (result < 0 && arena->memory)
        kvio_arena_unmap(arena);
    return result;
}

int kvio_arena_map(uint64_t length, int32_t numa_node, kvio_arena *arena) {
    if (!arena || length == 0 || length > UINT64_MAX / 4)
        return -EINVAL;
    if (numa_node >= 0 && !numa_node_exists(numa_node))
        return -EINVAL;
    length = (length + HUGE_BYTES - 1) / HUGE_BYTES * HUGE_BYTES;
    kvio_arena mapped = {.numa_node = numa_node};
    int result = map_with(map_reserved, length, &mapped);
    if (result < 0) {
        mapped.numa_node = numa_node;
        result = map_with(map_guarded, length, &mapped);
    }
    if (result == 0)
        *arena = mapped;
    return result;
}

int kvio_arena_unmap(kvio_arena *arena) {
    if (!arena || !arena->memory)
        return -EINVAL;
    uint8_t *memory = arena->memory;
    int result = munmap(memory, arena->length) < 0 ? -errno : 0;
    if (arena->page_type != KVIO_PAGES_RESERVED) {
        munmap(memory - KVIO_ALIGN, KVIO_ALIGN);
        munmap(memory + arena->length, KVIO_ALIGN);
    }
    memset(arena, 0, sizeof *arena);
    return result;
}
