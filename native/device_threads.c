/* SPDX-License-Identifier: Apache-2.0
 * A file or block device without io_uring: threads that call pread and pwrite.
 */
#include "internal.h"
#include <errno.h>
#include <unistd.h>

/* Transfer all; what lies past `needed` is padding and may be missing at the end of the file. */
static int transfer(struct device *device, const struct op *op, uint8_t *memory, bool write) {
    uint64_t length = media_bytes(&op->request), needed = op->request.length, done = 0;
    while (done < length) {
        off_t offset = (off_t)(op->request.offset + done);
        ssize_t moved = write ? pwrite(device->config.fd, memory + done, length - done, offset)
                              : pread(device->config.fd, memory + done, length - done, offset);
        if (moved < 0 && errno == EINTR)
            continue;
        if (moved < 0)
            return -errno;
        done += (uint64_t)moved;
        if (moved == 0 || done % KVIO_ALIGN) /* the end of the file */
            break;
    }
    return done >= (write ? length : needed) ? 0 : -EIO;
}

static void read_in(struct device *device, struct op *op, uint8_t *buffer) {
    bool load = op->request.kind == KVIO_LOAD;
    uint8_t *memory = load ? buffer : op->request.buffer;
    int result = transfer(device, op, memory, false);
    if (load && result == 0)
        result = chunk_load(device, op, memory);
    op_finish(device, op, result);
}

static void write_out(struct device *device, struct op *op) {
    uint8_t *memory = chunk_source(device, op);
    int result = op->request.kind == KVIO_MOVE ? chunk_check_move(op, memory) : 0;
    if (result == 0)
        result = transfer(device, op, memory, true);
    if (op->request.kind == KVIO_STORE)
        staging_release(device->engine, op->slot);
    op_finish(device, op, result);
}

static void threads_execute(struct device *device, struct op *op, uint8_t *buffer) {
    if (op->list == LIST_LOADS)
        read_in(device, op, buffer);
    else if (op->list == LIST_UNSTAGED)
        chunk_stage(device, op);
    else
        write_out(device, op);
}

static int threads_open(struct device *device) {
    device->parallel_loads = device->config.threads;
    return workers_open(device, device->engine->config.slot_bytes);
}

const struct backend threads_backend = {
    .io_path = KVIO_IO_THREADS,
    .stages_stores = true,
    .open = threads_open,
    .wake = workers_wake,
    .stop = workers_stop,
    .close = workers_close,
    .execute = threads_execute,
    .page_type = workers_page_type,
};
