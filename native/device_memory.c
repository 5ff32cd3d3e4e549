/* SPDX-License-Identifier: Apache-2.0
 * A DRAM module: copies between it and pages, each with its checksum in the same pass.
 */
#include "internal.h"
#include <errno.h>
#include <string.h>

static int move(struct device *device, struct op *op, uint8_t *module) {
    const kvio_op *request = &op->request;
    op->crc = kvio_copy_crc32c(0, module, chunk_keep(device, op), request->length);
    bool wrong = (request->flags & KVIO_FLAG_VERIFY) && op->crc != request->crc;
    return wrong ? -EBADMSG : 0;
}

static void memory_execute(struct device *device, struct op *op, uint8_t *buffer) {
    (void)buffer;
    const kvio_op *request = &op->request;
    uint8_t *module = (uint8_t *)device->config.memory + request->offset;
    int result = 0;
    switch (request->kind) {
    case KVIO_LOAD:
        result = chunk_load(device, op, module);
        break;
    case KVIO_STORE:
        chunk_gather(device, op, module);
        break;
    case KVIO_MOVE:
        result = move(device, op, module);
        break;
    case KVIO_READ:
        memcpy(request->buffer, module, request->length);
        break;
    default:
        memcpy(module, request->buffer, request->length);
    }
    op_finish(device, op, result);
}

static int memory_open(struct device *device) { return workers_open(device, 0); }

const struct backend memory_backend = {
    .open = memory_open,
    .wake = workers_wake,
    .stop = workers_stop,
    .close = workers_close,
    .execute = memory_execute,
};
