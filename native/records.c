/* SPDX-License-Identifier: Apache-2.0
 * Records of operations: address space for all that may be outstanding, memory for what has been.
 * Everything here runs under api_lock.
 */
#include "internal.h"
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

static uint64_t record_count(const struct device *device) {
    return (uint64_t)CLASSES * device->engine->config.queue_entries;
}

static void *map_lazily(uint64_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

static uint64_t block_bytes(const struct device *device) {
    return record_count(device) * device->block_stride * sizeof(int32_t);
}

int records_create(struct device *device) {
    device->records = map_lazily(record_count(device) * sizeof(struct op));
    if (!device->records)
        return -ENOMEM;
    int result = records_grow_blocks(device, device->engine->blocks_max);
    if (result < 0)
        records_destroy(device);
    return result;
}

void records_destroy(struct device *device) {
    if (device->block_ids)
        munmap(device->block_ids, block_bytes(device));
    munmap(device->records, record_count(device) * sizeof(struct op));
}

int records_grow_blocks(struct device *device, uint32_t blocks) {
    if (blocks <= device->block_stride)
        return 0;
    if (device->outstanding[CLASS_LOAD] || device->outstanding[CLASS_STORE])
        return -EBUSY;
    int32_t *block_ids = map_lazily(record_count(device) * blocks * sizeof(int32_t));
    if (!block_ids)
        return -ENOMEM;
    if (device->block_ids)
        munmap(device->block_ids, block_bytes(device));
    device->block_ids = block_ids;
    device->block_stride = blocks;
    return 0;
}

struct op *record_take(struct device *device, const kvio_op *request) {
    struct op *op = device->free_records;
    if (op)
        device->free_records = op->next;
    else
        op = &device->records[device->records_used++];
    uint64_t index = (uint64_t)(op - device->records);
    memset(op, 0, sizeof *op);
    op->request = *request;
    op->blocks = device->block_ids + index * device->block_stride;
    op->submitted_ns = clock_ns();
    op->number = device->submitted[op_class(&op->request)]++;
    device->outstanding[op_class(&op->request)]++;
    return op;
}

void record_return(struct kvio *engine, struct op *op) {
    struct device *device = engine->devices[op->request.device];
    device->outstanding[op_class(&op->request)]--;
    op->next = device->free_records;
    device->free_records = op;
}
