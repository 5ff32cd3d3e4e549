/* SPDX-License-Identifier: Apache-2.0 */
#include "crc32c.h"
#include "internal.h"
#include <errno.h>
#include <string.h>

static int verify(const struct op *op) {
    bool wrong = (op->request.flags & KVIO_FLAG_VERIFY) && op->crc != op->request.crc;
    return wrong ? -EBADMSG : 0;
}

uint8_t *chunk_keep(const struct device *device, const struct op *op) {
    const struct device *keep = device->engine->devices[op->request.keep];
    return (uint8_t *)keep->config.memory + op->request.keep_offset;
}

int chunk_load(struct device *device, struct op *op, const uint8_t *payload) {
    if (!load_may_scatter(device, op))
        return -ETIMEDOUT;
    op->crc =
        pages_scatter(op->group, op->blocks, payload, op->request.flags & KVIO_FLAG_UNCHECKED);
    int result = verify(op);
    /* Whoever gets these pages next may read past its own tokens, masked: a NaN would pass that. */
    if (result < 0)
        pages_clear(op->group, op->blocks);
    else if (op->request.keep != KVIO_NO_DEVICE) {
        memcpy(chunk_keep(device, op), payload, op->request.length);
        op->kept = true;
    }
    return result;
}

void chunk_gather(struct device *device, struct op *op, uint8_t *payload) {
    op->crc = pages_gather(op->group, op->blocks, payload);
    op->staged.event = (kvio_event){.tag = op->request.tag,
                                    .nanoseconds = clock_ns() - op->submitted_ns,
                                    .crc = op->crc,
                                    .kind = KVIO_EVENT_STAGED};
    events_push(device->engine, &op->staged);
}

void chunk_stage(struct device *device, struct op *op) {
    uint8_t *payload = staging_slot(device->engine, op->slot);
    uint32_t length = op->request.length;
    memset(payload + length, 0, media_bytes(&op->request) - length);
    chunk_gather(device, op, payload);
    queue_push_write(device, op);
}

int chunk_check_move(struct op *op, const uint8_t *payload) {
    op->crc = kvio_crc32c(0, payload, op->request.length);
    return verify(op);
}

uint8_t *chunk_source(struct device *device, const struct op *op) {
    switch (op->request.kind) {
    case KVIO_STORE:
        return staging_slot(device->engine, op->slot);
    case KVIO_MOVE:
        return chunk_keep(device, op);
    default:
        return op->request.buffer;
    }
}
