/* SPDX-License-Identifier: Apache-2.0
 * A file or block device without io_uring: threads that call pread and pwrite.
 */
#include "internal.h"
#include <errno.h>
#include <unistd.h>

int file_transfer(int fd, const struct extent *extent, uint8_t *memory, bool write) {
    uint64_t length = extent->length, done = 0;
    while (done < length) {
        off_t offset = (off_t)(extent->offset + done);
        ssize_t moved = write ? pwrite(fd, memory + done, length - done, offset)
                              : pread(fd, memory + done, length - done, offset);
        if (moved < 0 && errno == EINTR)
            continue;
        if (moved < 0)
            return -errno;
        done += (uint64_t)moved;
        if (moved == 0 || done % KVIO_ALIGN) /* the end of the file */
            break;
    }
    return done >= (write ? length : extent->needed) ? 0 : -EIO;
}

struct extent op_extent(const struct op *op) {
    const kvio_op *request = &op->request;
    return (struct extent){request->offset, media_bytes(request), request->length};
}

static int transfer(struct device *device, const struct op *op, uint8_t *memory, bool write) {
    struct extent extent = op_extent(op);
    return file_transfer(device->config.fd, &extent, memory, write);
}

static void read_in(struct device *device, struct op *op, uint8_t *buffer, transfer_call *move) {
    bool load = op->request.kind == KVIO_LOAD;
    uint8_t *memory = load ? buffer : op->request.buffer;
    int result = move(device, op, memory, false);
    if (load && result == 0)
        result = chunk_load(device, op, memory);
    op_finish(device, op, result);
}

static void write_out(struct device *device, struct op *op, transfer_call *move) {
    uint8_t *memory = chunk_source(device, op);
    int result = op->request.kind == KVIO_MOVE ? chunk_check_move(op, memory) : 0;
    if (result == 0)
        result = move(device, op, memory, true);
    if (op->request.kind == KVIO_STORE)
        staging_release(device->engine, op->slot);
    op_finish(device, op, result);
}

void threads_serve(struct device *device, struct op *op, uint8_t *buffer, transfer_call *move) {
    if (op->list == LIST_LOADS)
        read_in(device, op, buffer, move);
    else if (op->list == LIST_UNSTAGED)
        chunk_stage(device, op);
    else
        write_out(device, op, move);
}

static void threads_execute(struct device *device, struct op *op, uint8_t *buffer) {
    threads_serve(device, op, buffer, transfer);
}

int threads_open(struct device *device) {
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
