/* SPDX-License-Identifier: Apache-2.0
 * An arena never lands on memory of others: here another thread is always quick enough to take the
 * place in the address space that a refused mapping leaves.
 */
#include "internal.h"
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

static bool refused;
static uint8_t *neighbour;

static void *contended_mmap(void *address, size_t length, int protection, int flags, int fd,
                            off_t offset) {
    void *memory = mmap(address, length, protection, flags, fd, offset);
    if (memory == MAP_FAILED && !refused) {
        refused = true;
        flags = MAP_PRIVATE | MAP_ANONYMOUS | (address ? MAP_FIXED_NOREPLACE : 0);
        void *place = mmap(address, HUGE_BYTES, PROT_READ | PROT_WRITE, flags, -1, 0);
        if (place != MAP_FAILED)
            neighbour = memset(place, 0xAA, HUGE_BYTES);
    }
    return memory;
}

#define mmap contended_mmap
#include "arena.c"
#undef mmap

int main(void) {
    kvio_arena arena;
    if (kvio_arena_map(HUGE_BYTES, -1, &arena) < 0)
        return fprintf(stderr, "no arena\n"), 1;
    if (arena.page_type != KVIO_PAGES_RESERVED && !refused)
        return fprintf(stderr, "no mapping was refused\n"), 1;
    memset(arena.memory, 0xEE, arena.length);
    for (uint64_t i = 0; neighbour && i < HUGE_BYTES; i++)
        if (neighbour[i] != 0xAA)
            return fprintf(stderr, "byte %lu of another mapping is lost\n", (unsigned long)i), 1;
    return kvio_arena_unmap(&arena) < 0;
}
