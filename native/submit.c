/* SPDX-License-Identifier: Apache-2.0
 * kvio_submit checks everything, counts, and only then queues: all or nothing.
 */
#include "internal.h"
#include <errno.h>
#include <string.h>

#define FLAGS_ALLOWED (KVIO_FLAG_VERIFY | KVIO_FLAG_UNCHECKED)

static bool fits(const struct device *device, uint64_t offset, uint64_t bytes) {
    uint64_t length = device->config.length;
    return offset % KVIO_ALIGN == 0 && bytes <= length && offset <= length - bytes;
}

static bool keep_is_valid(const kvio *engine, const kvio_op *op) {
    if (op->keep >= engine->device_count)
        return false;
    const struct device *keep = engine->devices[op->keep];
    return keep->config.kind == KVIO_DEVICE_MEMORY && fits(keep, op->keep_offset, media_bytes(op));
}

static bool pages_are_valid(const kvio *engine, const kvio_op *op, const int32_t *blocks,
                            uint32_t block_count) {
    if (op->group >= engine->group_count)
        return false;
    const struct group *group = engine->groups[op->group];
    uint32_t needed = group->blocks_per_chunk;
    if (op->length != group->payload_bytes || needed > block_count ||
        op->first_block > block_count - needed)
        return false;
    for (uint32_t i = 0; op->kind == KVIO_STORE && i < needed; i++)
        if (blocks[op->first_block + i] < 0)
            return false;
    return true;
}

static int check_op(const kvio *engine, const kvio_op *op, const int32_t *blocks,
                    uint32_t block_count) {
    if (op->device >= engine->device_count || op->length == 0 || op->flags & ~FLAGS_ALLOWED ||
        !fits(engine->devices[op->device], op->offset, media_bytes(op)))
        return -EINVAL;
    bool valid = false;
    switch (op->kind) {
    case KVIO_LOAD:
        valid = pages_are_valid(engine, op, blocks, block_count) &&
                (op->keep == KVIO_NO_DEVICE || keep_is_valid(engine, op));
        break;
    case KVIO_STORE:
        if (engine->devices[op->device]->backend->stages_stores && !engine->config.store_buffers)
            return -ENOBUFS;
        valid = pages_are_valid(engine, op, blocks, block_count);
        break;
    case KVIO_MOVE:
        valid = op->length <= engine->config.slot_bytes && keep_is_valid(engine, op);
        break;
    case KVIO_READ:
    case KVIO_WRITE:
        valid =
            op->buffer && (uintptr_t)op->buffer % KVIO_ALIGN == 0 && op->length % KVIO_ALIGN == 0;
        break;
    }
    return valid ? 0 : -EINVAL;
}

static int check_ops(kvio *engine, const kvio_op *ops, uint32_t count, const int32_t *blocks,
                     uint32_t block_count) {
    for (uint32_t i = 0; i < engine->device_count; i++)
        memcpy(engine->devices[i]->counting, engine->devices[i]->outstanding,
               sizeof engine->devices[i]->counting);
    bool overflow = false;
    for (uint32_t i = 0; i < count; i++) {
        int result = check_op(engine, &ops[i], blocks, block_count);
        if (result < 0)
            return result;
        struct device *device = engine->devices[ops[i].device];
        overflow |= ++device->counting[op_class(&ops[i])] > engine->config.queue_entries;
    }
    return overflow ? -EAGAIN : 0;
}

static void prepare_op(kvio *engine, const kvio_op *request, const int32_t *blocks,
                       uint64_t now_ns) {
    struct device *device = engine->devices[request->device];
    struct op *op = record_take(device, request);
    op->submitted_ns = now_ns;
    if (request->kind == KVIO_LOAD || request->kind == KVIO_STORE) {
        op->group = engine->groups[request->group];
        memcpy(op->blocks, blocks + request->first_block,
               op->group->blocks_per_chunk * sizeof *blocks);
    }
    enum queue_list list = LIST_WRITES;
    if (op_class(request) == CLASS_LOAD)
        list = LIST_LOADS;
    else if (request->kind == KVIO_STORE && device->backend->stages_stores)
        list = LIST_UNSTAGED;
    else if (request->kind == KVIO_MOVE)
        list = LIST_MOVES;
    list_append(&device->incoming[list], op);
}

static void queue_all(kvio *engine) {
    for (uint32_t i = 0; i < engine->device_count; i++) {
        struct device *device = engine->devices[i];
        bool any = false;
        for (int list = 0; list < LISTS; list++)
            any |= device->incoming[list].count > 0;
        if (!any)
            continue;
        queue_push(device, device->incoming);
        device->backend->wake(device);
    }
}

int kvio_submit(kvio *engine, const kvio_op *ops, uint32_t count, const int32_t *blocks,
                uint32_t block_count) {
    if (!engine || (count && !ops) || (block_count && !blocks))
        return -EINVAL;
    pthread_mutex_lock(&engine->api_lock);
    int result = check_ops(engine, ops, count, blocks, block_count);
    if (result == 0) {
        uint64_t now_ns = clock_ns();
        for (uint32_t i = 0; i < count; i++)
            prepare_op(engine, &ops[i], blocks, now_ns);
        queue_all(engine);
    }
    pthread_mutex_unlock(&engine->api_lock);
    return result;
}

int kvio_cancel_stores(kvio *engine, uint64_t first_tag, uint64_t last_tag) {
    if (!engine)
        return -EINVAL;
    int count = 0;
    for (uint32_t i = 0; i < engine->device_count; i++)
        count += queue_cancel(engine->devices[i], first_tag, last_tag);
    return count;
}
