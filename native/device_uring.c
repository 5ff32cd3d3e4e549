/* SPDX-License-Identifier: Apache-2.0
 * A file or block device on io_uring. One thread keeps the device's queue full, and while transfers
 * are in flight it verifies and scatters those that came in, or gathers stores for later.
 *
 * A transfer is cut into pieces, so that a few large chunks keep the device as busy as many small
 * ones. The first transfers read, each into the staging slot of its number; the others write.
 */
#include "internal.h"
#include <errno.h>
#include <liburing.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#define PIECE_MOST (2u << 20) /* a huge page: larger requests gain nothing, smaller ones cost */
#define PIECE_LEAST (128u << 10)
#define SPARE_SLOTS 2u    /* one that is scattered and one that waits do not lower the depth */
#define PIECES_MAX 16384u /* of all transfers: what a submission queue holds */

struct piece {
    struct transfer *transfer;
    uint64_t start; /* in the transfer */
    uint32_t length;
};

struct transfer {
    struct transfer *next; /* free, or loaded */
    struct op *op;
    uint8_t *memory;
    int buffer; /* registered with the ring; -1: not */
    uint64_t length, issued;
    uint32_t in_flight;
    int result;
    struct piece *pieces;
};

struct transfer_list {
    struct transfer *first, *last;
};

struct ring {
    struct device *device;
    struct io_uring uring;
    pthread_t thread;
    int wake_fd;
    atomic_bool signalled; /* there may be something new in the queues */
    atomic_bool sleeping;  /* and it takes a write to wake_fd to have it seen */
    bool fixed_file, fixed_buffers;
    uint32_t piece_bytes, pieces_each, in_flight;
    uint32_t read_slots, reading; /* reading: transfers whose pieces have not all come */
    kvio_arena slots;
    struct transfer *transfers;
    struct piece *pieces;
    struct transfer *free_transfers[CLASSES];
    struct transfer_list loaded; /* read, not scattered yet */
};

/* ---- pieces ---- */
static void prepare(struct ring *ring, struct io_uring_sqe *sqe, const struct piece *piece) {
    const struct transfer *transfer = piece->transfer;
    uint8_t *memory = transfer->memory + piece->start;
    uint64_t offset = transfer->op->request.offset + piece->start;
    int fd = ring->fixed_file ? 0 : ring->device->config.fd;
    bool write = op_class(&transfer->op->request) == CLASS_STORE;
    if (transfer->buffer >= 0 && write)
        io_uring_prep_write_fixed(sqe, fd, memory, piece->length, offset, transfer->buffer);
    else if (transfer->buffer >= 0)
        io_uring_prep_read_fixed(sqe, fd, memory, piece->length, offset, transfer->buffer);
    else if (write)
        io_uring_prep_write(sqe, fd, memory, piece->length, offset);
    else
        io_uring_prep_read(sqe, fd, memory, piece->length, offset);
    if (ring->fixed_file)
        sqe->flags |= IOSQE_FIXED_FILE;
}

static void issue(struct ring *ring, struct piece *piece) {
    struct io_uring_sqe *sqe = io_uring_get_sqe(&ring->uring); /* holds all pieces there are */
    prepare(ring, sqe, piece);
    io_uring_sqe_set_data(sqe, piece);
    piece->transfer->in_flight++;
    ring->in_flight++;
}

static bool issue_next(struct ring *ring, struct piece *piece) {
    struct transfer *transfer = piece->transfer;
    uint64_t left = transfer->length - transfer->issued;
    if (!left || transfer->result < 0)
        return false;
    piece->start = transfer->issued;
    piece->length = left < ring->piece_bytes ? (uint32_t)left : ring->piece_bytes;
    transfer->issued += piece->length;
    issue(ring, piece);
    return true;
}

/* What is left of a piece that moved `moved` bytes; true where that has to be asked for again. */
static bool piece_continues(struct piece *piece, int moved) {
    struct transfer *transfer = piece->transfer;
    const kvio_op *request = &transfer->op->request;
    if (moved == -EINTR || moved == -EAGAIN)
        return true;
    if (moved < 0) {
        transfer->result = moved == -ECANCELED ? -EIO : moved;
        return false;
    }
    piece->start += (uint32_t)moved;
    piece->length -= (uint32_t)moved;
    /* What lies past the payload is padding and may be missing at the end of a file. */
    if (!piece->length || (op_class(request) == CLASS_LOAD && piece->start >= request->length))
        return false;
    if (moved > 0 && moved % KVIO_ALIGN == 0)
        return true;
    transfer->result = -EIO;
    return false;
}

/* ---- transfers ---- */
static void start_transfer(struct ring *ring, struct op *op) {
    struct device *device = ring->device;
    const kvio_op *request = &op->request;
    struct transfer **free_list = &ring->free_transfers[op_class(request)];
    struct transfer *transfer = *free_list;
    *free_list = transfer->next;
    uint32_t index = (uint32_t)(transfer - ring->transfers);
    ring->reading += index < ring->read_slots;
    transfer->op = op;
    transfer->length = media_bytes(request);
    transfer->issued = 0;
    transfer->result = 0;
    transfer->buffer = -1;
    if (request->kind == KVIO_LOAD) {
        transfer->memory =
            (uint8_t *)ring->slots.memory + index * device->engine->config.slot_bytes;
        transfer->buffer = ring->fixed_buffers ? (int)index : -1;
    } else {
        transfer->memory = chunk_source(device, op);
        if (request->kind == KVIO_STORE && ring->fixed_buffers)
            transfer->buffer = (int)(ring->read_slots + op->slot);
    }
    for (uint32_t i = 0; i < ring->pieces_each; i++)
        if (!issue_next(ring, &transfer->pieces[i]))
            break;
}

static void end_transfer(struct ring *ring, struct transfer *transfer, int result) {
    struct op *op = transfer->op;
    struct transfer **free_list = &ring->free_transfers[op_class(&op->request)];
    transfer->next = *free_list;
    *free_list = transfer;
    if (op->request.kind == KVIO_STORE)
        staging_release(ring->device->engine, op->slot);
    op_finish(ring->device, op, result);
}

static void transfer_arrived(struct ring *ring, struct transfer *transfer) {
    ring->reading -= transfer < ring->transfers + ring->read_slots;
    if (transfer->op->request.kind != KVIO_LOAD || transfer->result < 0) {
        end_transfer(ring, transfer, transfer->result);
        return;
    }
    transfer->next = NULL;
    if (ring->loaded.first)
        ring->loaded.last->next = transfer;
    else
        ring->loaded.first = transfer;
    ring->loaded.last = transfer;
}

static void piece_arrived(struct ring *ring, struct piece *piece, int moved) {
    struct transfer *transfer = piece->transfer;
    ring->in_flight--;
    transfer->in_flight--;
    if (piece_continues(piece, moved))
        issue(ring, piece);
    else if (!issue_next(ring, piece) && !transfer->in_flight)
        transfer_arrived(ring, transfer);
}

/* ---- the thread ---- */
static void watch_wake_fd(struct ring *ring) {
    struct io_uring_sqe *sqe = io_uring_get_sqe(&ring->uring);
    io_uring_prep_poll_add(sqe, ring->wake_fd, POLLIN);
    io_uring_sqe_set_data(sqe, NULL);
}

/* Take in what has come; false where nothing had. */
static bool reap(struct ring *ring) {
    struct io_uring_cqe *cqe;
    bool any = false;
    while (io_uring_peek_cqe(&ring->uring, &cqe) == 0) {
        struct piece *piece = io_uring_cqe_get_data(cqe);
        int moved = cqe->res;
        io_uring_cqe_seen(&ring->uring, cqe);
        if (piece) {
            piece_arrived(ring, piece, moved);
        } else {
            eventfd_t count;
            (void)!eventfd_read(ring->wake_fd, &count);
            watch_wake_fd(ring);
        }
        any = true;
    }
    return any;
}

static struct op *take(struct ring *ring, unsigned wanted, uint64_t *wake_ns) {
    pthread_mutex_lock(&ring->device->lock);
    struct op *op = queue_take(ring->device, wanted, wake_ns);
    pthread_mutex_unlock(&ring->device->lock);
    return op;
}

static void fill(struct ring *ring, uint64_t *wake_ns) {
    uint32_t depth = ring->device->config.depth;
    for (;;) {
        bool read = ring->free_transfers[CLASS_LOAD] && ring->reading < depth;
        bool write = ring->free_transfers[CLASS_STORE] != NULL;
        unsigned wanted = (read ? TAKE(LIST_LOADS) : 0) | (write ? TAKE_WRITES : 0);
        struct op *op = take(ring, wanted, wake_ns);
        if (!op)
            return;
        int result = 0;
        if (op->request.kind == KVIO_MOVE) {
            (void)io_uring_submit(&ring->uring); /* loads do not wait for the check */
            result = chunk_check_move(op, chunk_source(ring->device, op));
        }
        if (result < 0)
            op_finish(ring->device, op, result);
        else
            start_transfer(ring, op);
    }
}

static bool scatter_one(struct ring *ring) {
    struct transfer *transfer = ring->loaded.first;
    if (!transfer)
        return false;
    ring->loaded.first = transfer->next;
    end_transfer(ring, transfer, chunk_load(ring->device, transfer->op, transfer->memory));
    return true;
}

static bool gather_one(struct ring *ring) {
    uint64_t wake_ns = NEVER;
    struct op *op = take(ring, TAKE(LIST_UNSTAGED), &wake_ns);
    if (op)
        chunk_stage(ring->device, op);
    return op != NULL;
}

static bool stopping(struct ring *ring) {
    pthread_mutex_lock(&ring->device->lock);
    bool stopping = ring->device->stopping;
    pthread_mutex_unlock(&ring->device->lock);
    return stopping;
}

static void sleep_until(struct ring *ring, uint64_t wake_ns) {
    struct io_uring_cqe *cqe;
    struct __kernel_timespec timeout, *limit = NULL;
    atomic_store(&ring->sleeping, true);
    if (!atomic_load(&ring->signalled)) {
        if (wake_ns != NEVER) {
            uint64_t now_ns = clock_ns(), left_ns = wake_ns > now_ns ? wake_ns - now_ns : 0;
            timeout = (struct __kernel_timespec){.tv_sec = (int64_t)(left_ns / 1000000000u),
                                                 .tv_nsec = (int64_t)(left_ns % 1000000000u)};
            limit = &timeout;
        }
        (void)io_uring_submit_and_wait_timeout(&ring->uring, &cqe, 1, limit, NULL);
    }
    atomic_store(&ring->sleeping, false);
}

static void *ring_run(void *argument) {
    struct ring *ring = argument;
    thread_bind(ring->device->config.numa_node);
    watch_wake_fd(ring);
    for (;;) {
        uint64_t wake_ns = NEVER;
        atomic_store(&ring->signalled, false);
        bool arrived = reap(ring);
        fill(ring, &wake_ns);
        (void)io_uring_submit(&ring->uring); /* what is refused now stays for the next time */
        if (scatter_one(ring) || arrived || gather_one(ring))
            continue;
        if (!ring->in_flight && stopping(ring))
            return NULL;
        sleep_until(ring, wake_ns);
    }
}

/* ---- set-up ---- */
static bool read_number(const char *path, uint32_t *number) {
    FILE *file = fopen(path, "re");
    bool found = file && fscanf(file, "%u", number) == 1;
    if (file)
        fclose(file);
    return found;
}

/* The largest power of two that the medium takes as one request. The kernel cuts larger ones, and
 * a bandwidth limit of the block I/O controller then charges what was cut off twice. */
static uint32_t largest_piece(int fd) {
    static const char *const places[] = {"", "/.."}; /* a disk, a partition of one */
    uint32_t most_kib, piece = PIECE_MOST;
    struct stat status;
    if (fstat(fd, &status) < 0)
        return piece;
    dev_t device = S_ISBLK(status.st_mode) ? status.st_rdev : status.st_dev;
    for (unsigned i = 0; i < 2; i++) {
        char path[96];
        snprintf(path, sizeof path, "/sys/dev/block/%u:%u%s/queue/max_sectors_kb", major(device),
                 minor(device), places[i]);
        if (!read_number(path, &most_kib))
            continue;
        while (piece > PIECE_LEAST && piece / 1024 > most_kib)
            piece /= 2;
        break;
    }
    return piece;
}

static void register_all(struct ring *ring) {
    const struct kvio *engine = ring->device->engine;
    uint64_t slot_bytes = engine->config.slot_bytes;
    uint32_t reads = ring->read_slots, count = reads + engine->config.store_buffers;
    ring->fixed_file = io_uring_register_files(&ring->uring, &ring->device->config.fd, 1) == 0;
    struct iovec *slots = calloc(count, sizeof *slots);
    if (!slots)
        return;
    for (uint32_t i = 0; i < count; i++) {
        uint8_t *read_slot = (uint8_t *)ring->slots.memory + i * slot_bytes;
        slots[i].iov_base = i < reads ? read_slot : staging_slot(engine, i - reads);
        slots[i].iov_len = slot_bytes;
    }
    /* Refused where the user may not lock as much memory: works without. */
    ring->fixed_buffers = io_uring_register_buffers(&ring->uring, slots, count) == 0;
    free(slots);
}

static int make_transfers(struct ring *ring) {
    const struct device *device = ring->device;
    uint32_t count = ring->read_slots + device->config.depth, each;
    ring->piece_bytes = largest_piece(device->config.fd);
    each =
        (uint32_t)((device->engine->config.slot_bytes + ring->piece_bytes - 1) / ring->piece_bytes);
    each = each < 2 ? 2 : each; /* READ and WRITE may be longer than a slot */
    each = each > PIECES_MAX / count ? PIECES_MAX / count : each;
    ring->pieces_each = each;
    ring->transfers = calloc(count, sizeof *ring->transfers);
    ring->pieces = calloc((size_t)count * each, sizeof *ring->pieces);
    if (!ring->transfers || !ring->pieces)
        return -ENOMEM;
    for (uint32_t i = count; i-- > 0;) {
        struct transfer *transfer = &ring->transfers[i];
        struct transfer **free_list =
            &ring->free_transfers[i < ring->read_slots ? CLASS_LOAD : CLASS_STORE];
        transfer->pieces = ring->pieces + (size_t)i * each;
        transfer->next = *free_list;
        *free_list = transfer;
        for (uint32_t j = 0; j < each; j++)
            transfer->pieces[j].transfer = transfer;
    }
    return 0;
}

static void ring_free(struct ring *ring) {
    if (ring->slots.memory)
        kvio_arena_unmap(&ring->slots);
    if (ring->wake_fd >= 0)
        close(ring->wake_fd);
    free(ring->transfers);
    free(ring->pieces);
    free(ring);
}

static int prepare_ring(struct ring *ring) {
    const kvio_device_config *config = &ring->device->config;
    ring->read_slots = config->depth + SPARE_SLOTS;
    int result = make_transfers(ring);
    if (result < 0)
        return result;
    ring->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (ring->wake_fd < 0)
        return -errno;
    result = kvio_arena_map(ring->read_slots * ring->device->engine->config.slot_bytes,
                            config->numa_node, &ring->slots);
    if (result < 0)
        return result;
    unsigned entries = (ring->read_slots + config->depth) * ring->pieces_each + 1;
    return io_uring_queue_init(entries, &ring->uring, 0);
}

static int uring_open(struct device *device) {
    struct ring *ring = calloc(1, sizeof *ring);
    if (!ring)
        return -ENOMEM;
    ring->device = device;
    ring->wake_fd = -1;
    int result = prepare_ring(ring);
    if (result < 0) {
        ring_free(ring);
        return result;
    }
    register_all(ring);
    device->state = ring;
    device->parallel_loads = device->config.depth;
    result = thread_start(&ring->thread, "kvio-uring", ring_run, ring);
    if (result < 0) {
        io_uring_queue_exit(&ring->uring);
        ring_free(ring);
    }
    return result;
}

static void uring_wake(struct device *device) {
    struct ring *ring = device->state;
    atomic_store(&ring->signalled, true);
    if (atomic_exchange(&ring->sleeping, false))
        (void)!eventfd_write(ring->wake_fd, 1);
}

static void uring_stop(struct device *device) {
    struct ring *ring = device->state;
    uring_wake(device);
    pthread_join(ring->thread, NULL);
}

static void uring_close(struct device *device) {
    struct ring *ring = device->state;
    io_uring_queue_exit(&ring->uring);
    ring_free(ring);
}

static int uring_page_type(const struct device *device) {
    const struct ring *ring = device->state;
    return (int)ring->slots.page_type;
}

const struct backend uring_backend = {
    .io_path = KVIO_IO_URING,
    .stages_stores = true,
    .open = uring_open,
    .wake = uring_wake,
    .stop = uring_stop,
    .close = uring_close,
    .page_type = uring_page_type,
};
