/* SPDX-License-Identifier: Apache-2.0
 * Staging slots for stores. A device that finds none leaves its mark and is woken when one is free.
 */
#include "internal.h"
#include <errno.h>
#include <stdlib.h>

/* What it leaves half done staging_destroy undoes. */
int staging_create(struct kvio *engine) {
    struct staging *staging = &engine->staging;
    uint32_t count = engine->config.store_buffers;
    if (!count)
        return 0;
    staging->free_slots = calloc(count, sizeof *staging->free_slots);
    if (!staging->free_slots)
        return -ENOMEM;
    int result = kvio_arena_map(count * engine->config.slot_bytes, engine->config.staging_numa_node,
                                &staging->arena);
    if (result < 0)
        return result;
    while (staging->free_count < count) { /* slot 0 on top */
        staging->free_slots[staging->free_count] = count - 1 - staging->free_count;
        staging->free_count++;
    }
    return 0;
}

void staging_destroy(struct kvio *engine) {
    if (engine->staging.arena.memory)
        kvio_arena_unmap(&engine->staging.arena);
    free(engine->staging.free_slots);
}

bool staging_acquire(struct device *device, uint32_t *slot) {
    struct staging *staging = &device->engine->staging;
    pthread_mutex_lock(&staging->lock);
    bool found = staging->free_count > 0;
    if (found)
        *slot = staging->free_slots[--staging->free_count];
    else
        staging->waiting |= UINT64_C(1) << device->index;
    pthread_mutex_unlock(&staging->lock);
    return found;
}

void staging_release(struct kvio *engine, uint32_t slot) {
    struct staging *staging = &engine->staging;
    pthread_mutex_lock(&staging->lock);
    staging->free_slots[staging->free_count++] = slot;
    uint64_t waiting = staging->waiting;
    staging->waiting = 0;
    pthread_mutex_unlock(&staging->lock);
    for (uint32_t i = 0; waiting; i++, waiting >>= 1)
        if (waiting & 1)
            engine->devices[i]->backend->wake(engine->devices[i]);
}

uint8_t *staging_slot(const struct kvio *engine, uint32_t slot) {
    return (uint8_t *)engine->staging.arena.memory + slot * engine->config.slot_bytes;
}
