/* SPDX-License-Identifier: Apache-2.0
 * Gather and scatter: a chunk's payload is its blocks, one after another, each of them the pages of
 * all tensors. Pages that touch in memory are copied as one.
 */
#include "crc32c.h"
#include "internal.h"
#include <string.h>

#define AHEAD_BYTES 1024u /* of the next page, fetched while this one is copied */

typedef uint32_t (*copy_function)(uint32_t, uint8_t *, const uint8_t *, size_t, const uint8_t *);

static copy_function choose_copy(const struct group *group) {
    const struct crc_kernel *kernel = crc_kernel();
    return group->payload_bytes < STREAM_FROM_BYTES ? kernel->copy : kernel->stream;
}

static uint8_t *page_of(const struct tensor *tensor, int32_t block) {
    return (uint8_t *)(uintptr_t)(tensor->base + (uint64_t)block * tensor->stride);
}

static void fetch_ahead(const uint8_t *page, uint64_t length) {
    uint64_t end = length < AHEAD_BYTES ? length : AHEAD_BYTES;
    for (uint64_t i = 0; i < end; i += 64)
        __builtin_prefetch(page + i);
}

/* A walk over the pages of a chunk in payload order, as runs of touching pages. */
struct walk {
    const struct group *group;
    const int32_t *blocks;
    uint32_t block, tensor;
};

static bool walk_ended(const struct walk *walk) {
    return walk->block == walk->group->blocks_per_chunk;
}

static void walk_step(struct walk *walk) {
    if (++walk->tensor == walk->group->tensors) {
        walk->tensor = 0;
        walk->block++;
    }
}

/* The next run; its address is NULL where the blocks are skipped. */
static uint64_t walk_run(struct walk *walk, uint8_t **address) {
    const struct group *group = walk->group;
    if (walk->blocks[walk->block] < 0) {
        walk->block++;
        *address = NULL;
        return group->block_bytes;
    }
    const struct tensor *tensor = &group->tensor[walk->tensor];
    uint8_t *start = page_of(tensor, walk->blocks[walk->block]);
    uint64_t length = tensor->length;
    for (walk_step(walk); !walk_ended(walk); walk_step(walk)) {
        tensor = &group->tensor[walk->tensor];
        int32_t block = walk->blocks[walk->block];
        if (block < 0 || page_of(tensor, block) != start + length)
            break;
        length += tensor->length;
    }
    *address = start;
    return length;
}

uint32_t pages_gather(const struct group *group, const int32_t *blocks, uint8_t *payload) {
    copy_function copy = choose_copy(group);
    struct walk walk = {group, blocks, 0, 0};
    uint32_t crc = UINT32_MAX;
    while (!walk_ended(&walk)) {
        uint8_t *run;
        uint64_t length = walk_run(&walk, &run);
        if (!walk_ended(&walk)) {
            const struct tensor *next = &group->tensor[walk.tensor];
            fetch_ahead(page_of(next, blocks[walk.block]), next->length);
        }
        crc = copy(crc, payload, run, length, run + length);
        payload += length;
    }
    crc_fence();
    return ~crc;
}

void pages_clear(const struct group *group, const int32_t *blocks) {
    struct walk walk = {group, blocks, 0, 0};
    while (!walk_ended(&walk)) {
        uint8_t *run;
        uint64_t length = walk_run(&walk, &run);
        if (run)
            memset(run, 0, length);
    }
}

uint32_t pages_scatter(const struct group *group, const int32_t *blocks, const uint8_t *payload,
                       bool unchecked) {
    copy_function copy = unchecked ? crc_kernel()->stream_alone : choose_copy(group);
    const uint8_t *end = payload + group->payload_bytes;
    struct walk walk = {group, blocks, 0, 0};
    uint32_t crc = UINT32_MAX;
    while (!walk_ended(&walk)) {
        uint8_t *run;
        uint64_t length = walk_run(&walk, &run);
        crc = run ? copy(crc, run, payload, length, end)
                  : crc_kernel()->check(crc, payload, length, end);
        payload += length;
    }
    crc_fence();
    return ~crc;
}
