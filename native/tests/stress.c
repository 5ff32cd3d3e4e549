/* SPDX-License-Identifier: Apache-2.0
 * Hammers engines with random operations and checks every byte that comes back; each engine is
 * destroyed with work queued and in flight. For the sanitizers.
 *
 *   stress <directory> <uring|threads|faulty> [seed]
 */
#include "kvio.h"
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define ENGINES 6
#define STEPS 1000 /* batches for each engine */
#define LANES 48   /* operations outstanding at once, each with blocks and a buffer of its own */
#define SLOTS 24   /* on each device */
#define SLOT_BYTES (128u << 10)
#define DEVICES 5 /* file, file, memory, memory, nil */
#define FIRST_MEMORY 2u
#define NIL 4u
#define BLOCKS 3 /* a chunk */
#define TENSORS 2
#define GROUPS 2

static const uint32_t lengths[GROUPS][TENSORS] = {{1536, 7001}, {16384, 20480}};
static uint64_t seed, state;
static bool faulty;

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "line %d: %s; seed %" PRIu64 "\n", __LINE__, #condition, seed);        \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static uint32_t random_below(uint32_t bound) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (uint32_t)(state >> 32) % bound;
}

struct slot {
    bool busy, filled;
    uint32_t group, crc;
};

struct lane {
    bool busy, wrong_crc, staged;
    kvio_op op;
};

struct bench {
    kvio *engine;
    int fds[2];
    uint32_t groups[GROUPS];
    kvio_arena modules[2], pages, buffers;
    struct slot slots[DEVICES][SLOTS];
    struct lane lanes[LANES];
    uint32_t busy;
    atomic_bool ended;
};

static uint8_t *page(struct bench *bench, uint32_t lane, uint32_t block, uint32_t tensor) {
    uint64_t index = ((uint64_t)tensor * LANES + lane) * BLOCKS + block;
    return (uint8_t *)bench->pages.memory + index * 32768;
}

static uint32_t chunk_bytes(uint32_t group) {
    return BLOCKS * (lengths[group][0] + lengths[group][1]);
}

static uint32_t pages_crc(struct bench *bench, uint32_t lane, uint32_t group) {
    uint32_t crc = 0;
    for (uint32_t block = 0; block < BLOCKS; block++)
        for (uint32_t tensor = 0; tensor < TENSORS; tensor++)
            crc = kvio_crc32c(crc, page(bench, lane, block, tensor), lengths[group][tensor]);
    return crc;
}

static void fill_pages(struct bench *bench, uint32_t lane, uint32_t group) {
    for (uint32_t block = 0; block < BLOCKS; block++)
        for (uint32_t tensor = 0; tensor < TENSORS; tensor++)
            memset(page(bench, lane, block, tensor), (int)random_below(256),
                   lengths[group][tensor]);
}

static bool pick_slot(struct bench *bench, uint32_t device, bool filled, uint32_t *slot) {
    uint32_t start = random_below(SLOTS);
    for (uint32_t i = 0; i < SLOTS; i++) {
        struct slot *found = &bench->slots[device][(start + i) % SLOTS];
        if (!found->busy && (!filled || found->filled)) {
            *slot = (start + i) % SLOTS;
            return true;
        }
    }
    return false;
}

static struct slot *slot_of(struct bench *bench, uint32_t device, uint64_t offset) {
    return &bench->slots[device][offset / SLOT_BYTES];
}

static bool plan_move(struct bench *bench, kvio_op *op) {
    uint32_t slot;
    op->keep = FIRST_MEMORY + random_below(2);
    if (op->keep == op->device || !pick_slot(bench, op->keep, true, &slot))
        return false;
    struct slot *source = &bench->slots[op->keep][slot];
    source->busy = true;
    op->keep_offset = (uint64_t)slot * SLOT_BYTES;
    op->group = source->group;
    op->crc = source->crc;
    op->flags = KVIO_FLAG_VERIFY;
    return true;
}

static void plan_load(struct bench *bench, struct lane *lane) {
    kvio_op *op = &lane->op;
    const struct slot *source = slot_of(bench, op->device, op->offset);
    uint32_t slot, keep = FIRST_MEMORY + random_below(2);
    lane->wrong_crc = random_below(10) == 0 && op->device != NIL;
    op->flags = KVIO_FLAG_VERIFY;
    op->group = source->group;
    op->crc = lane->wrong_crc ? ~source->crc : source->crc;
    if (random_below(3) == 0 && keep != op->device && op->device != NIL &&
        pick_slot(bench, keep, false, &slot)) {
        op->keep = keep;
        op->keep_offset = (uint64_t)slot * SLOT_BYTES;
        bench->slots[keep][slot].busy = true;
    }
}

/* Plan an operation on a lane that is free; false where nothing fits just now. */
static bool plan(struct bench *bench, uint32_t index) {
    struct lane *lane = &bench->lanes[index];
    kvio_op *op = &lane->op;
    uint32_t slot, kind = random_below(5), device = random_below(DEVICES);
    if (kind == KVIO_READ && device == NIL)
        return false;
    if (!pick_slot(bench, device, kind == KVIO_LOAD || kind == KVIO_READ, &slot))
        return false;
    *lane = (struct lane){.busy = true};
    *op = (kvio_op){.tag = index, .kind = kind, .device = device, .keep = KVIO_NO_DEVICE};
    op->offset = (uint64_t)slot * SLOT_BYTES;
    op->first_block = index * BLOCKS;
    op->buffer = (uint8_t *)bench->buffers.memory + (uint64_t)index * SLOT_BYTES;
    op->group = random_below(GROUPS);
    bench->slots[device][slot].busy = true;
    if (kind == KVIO_LOAD)
        plan_load(bench, lane);
    else if (kind == KVIO_STORE)
        fill_pages(bench, index, op->group);
    else if (kind == KVIO_MOVE && !plan_move(bench, op)) {
        bench->slots[device][slot].busy = false;
        lane->busy = false;
        return false;
    }
    op->length = kind == KVIO_READ || kind == KVIO_WRITE ? SLOT_BYTES : chunk_bytes(op->group);
    if (kind == KVIO_WRITE)
        memset(op->buffer, (int)random_below(256), op->length);
    bench->busy++;
    return true;
}

static void check_load(struct bench *bench, struct lane *lane, const kvio_event *event) {
    const kvio_op *op = &lane->op;
    CHECK(event->result == (lane->wrong_crc ? -EBADMSG : 0));
    CHECK(event->kept == (op->keep != KVIO_NO_DEVICE && !lane->wrong_crc));
    static const uint8_t zeros[SLOT_BYTES];
    uint32_t held = lane->wrong_crc ? kvio_crc32c(0, zeros, op->length) : event->crc;
    if (op->device != NIL)
        CHECK(pages_crc(bench, (uint32_t)op->tag, op->group) == held);
    if (op->keep == KVIO_NO_DEVICE)
        return;
    struct slot *keep = slot_of(bench, op->keep, op->keep_offset);
    keep->busy = false;
    if (event->kept) {
        *keep = (struct slot){.filled = true, .group = op->group, .crc = event->crc};
        const uint8_t *module = bench->modules[op->keep - FIRST_MEMORY].memory;
        CHECK(kvio_crc32c(0, module + op->keep_offset, op->length) == event->crc);
    }
}

static void check_written(struct bench *bench, struct lane *lane, const kvio_event *event) {
    const kvio_op *op = &lane->op;
    struct slot *slot = slot_of(bench, op->device, op->offset);
    if (event->result == -ECANCELED) {
        CHECK(op->kind == KVIO_STORE && !lane->staged);
        return;
    }
    CHECK(event->result == 0);
    uint32_t crc = event->crc;
    if (op->kind == KVIO_STORE && op->device != NIL)
        CHECK(lane->staged && crc == pages_crc(bench, (uint32_t)op->tag, op->group));
    if (op->kind == KVIO_WRITE)
        crc = kvio_crc32c(0, op->buffer, chunk_bytes(op->group));
    *slot = (struct slot){.busy = true, .filled = true, .group = op->group, .crc = crc};
}

static void check_event(struct bench *bench, const kvio_event *event) {
    struct lane *lane = &bench->lanes[event->tag];
    const kvio_op *op = &lane->op;
    CHECK(event->tag < LANES && lane->busy);
    if (event->kind == KVIO_EVENT_STAGED) {
        CHECK(op->kind == KVIO_STORE && !lane->staged);
        lane->staged = true;
        return;
    }
    if (op->kind == KVIO_LOAD)
        check_load(bench, lane, event);
    else if (op->kind != KVIO_READ)
        check_written(bench, lane, event);
    struct slot *slot = slot_of(bench, op->device, op->offset);
    if (op->kind == KVIO_READ) {
        CHECK(event->result == 0);
        CHECK(kvio_crc32c(0, op->buffer, chunk_bytes(slot->group)) == slot->crc);
    }
    if (op->kind == KVIO_MOVE)
        slot_of(bench, op->keep, op->keep_offset)->busy = false;
    slot->busy = false;
    lane->busy = false;
    bench->busy--;
}

static void poll_events(struct bench *bench) {
    kvio_event events[16];
    CHECK(kvio_wait(bench->engine, 10000000) == 1);
    int count = kvio_poll(bench->engine, events, 1 + random_below(16));
    CHECK(count >= 0);
    for (int i = 0; i < count; i++)
        check_event(bench, &events[i]);
}

static void submit_some(struct bench *bench) {
    kvio_op ops[LANES];
    int32_t blocks[LANES * BLOCKS];
    uint32_t count = 0, wanted = 1 + random_below(12);
    for (uint32_t i = 0; i < LANES * BLOCKS; i++)
        blocks[i] = (int32_t)i;
    for (uint32_t i = 0; i < LANES && count < wanted; i++)
        if (!bench->lanes[i].busy && plan(bench, i))
            ops[count++] = bench->lanes[i].op;
    CHECK(kvio_submit(bench->engine, ops, count, blocks, LANES * BLOCKS) == 0);
}

static void *interfere(void *argument) {
    struct bench *bench = argument;
    uint64_t counts[KVIO_FAULT_KINDS];
    const struct timespec pause = {.tv_nsec = 300000};
    for (uint32_t i = 0; !atomic_load(&bench->ended); i++) {
        kvio_statistics statistics;
        CHECK(kvio_device_statistics(bench->engine, i % DEVICES, &statistics) == 0);
        CHECK(kvio_cancel_stores(bench->engine, i % LANES, i % LANES + 2) >= 0);
        uint64_t rate = i % 7 == 0 ? UINT64_C(2000000000) : 0;
        CHECK(kvio_set_shape(bench->engine, i % DEVICES, rate, rate, i % 11 == 0 ? 200 : 0) == 0);
        if (faulty && i % 3 == 0) {
            CHECK(kvio_faulty_release(bench->engine, i % 2) == 0);
            CHECK(kvio_faulty_counts(bench->engine, i % 2, counts) == 0);
        }
        if (faulty && i % 50 == 0)
            CHECK(kvio_faulty_sync(bench->engine, i % 2) == 0);
        nanosleep(&pause, NULL);
    }
    return NULL;
}

/* Of all faults only those that show in no result. */
static void add_faulty(struct bench *bench, const kvio_device_config *config) {
    const uint32_t both = KVIO_FAULT_READS | KVIO_FAULT_WRITES, often = KVIO_FAULT_ALWAYS / 2;
    const kvio_fault_rule rules[] = {
        {.kind = KVIO_FAULT_STUCK, .every = 1, .directions = both, .probability = often / 25},
        {.kind = KVIO_FAULT_SLOW,
         .every = 2,
         .directions = both,
         .probability = often,
         .delay_us = 100},
    };
    kvio_fault_script script = {.seed = seed, .volatile_bytes = 8 * SLOT_BYTES, .rules = rules};
    script.rule_count = sizeof rules / sizeof *rules;
    int device = kvio_add_faulty_device(bench->engine, config, &script);
    CHECK(device >= 0);
    CHECK(kvio_faulty_script(bench->engine, (uint32_t)device, &script) == 0);
}

static void add_devices(struct bench *bench, uint32_t io_path) {
    kvio_device_config config = {.kind = KVIO_DEVICE_FILE, .io_path = io_path, .numa_node = -1};
    config.length = (uint64_t)SLOTS * SLOT_BYTES;
    for (uint32_t i = 0; i < 2; i++) {
        config.fd = bench->fds[i];
        config.depth = 1 + 3 * i;
        config.threads = 1 + 2 * i;
        if (faulty)
            add_faulty(bench, &config);
        else
            CHECK(kvio_add_device(bench->engine, &config) == (int)i);
    }
    config.kind = KVIO_DEVICE_MEMORY;
    for (uint32_t i = 0; i < 2; i++) {
        config.memory = bench->modules[i].memory;
        config.threads = 1 + i;
        CHECK(kvio_add_device(bench->engine, &config) == (int)(FIRST_MEMORY + i));
    }
    config.kind = KVIO_DEVICE_NIL;
    CHECK(kvio_add_device(bench->engine, &config) == NIL);
}

static void open_engine(struct bench *bench, uint32_t io_path) {
    kvio_config config = {.slot_bytes = SLOT_BYTES,
                          .store_buffers = 3,
                          .queue_entries = LANES,
                          .staging_numa_node = -1};
    CHECK(kvio_create(&config, &bench->engine) == 0);
    add_devices(bench, io_path);
    uint64_t bases[TENSORS], strides[TENSORS] = {32768, 32768};
    for (uint32_t tensor = 0; tensor < TENSORS; tensor++)
        bases[tensor] = (uintptr_t)page(bench, 0, 0, tensor);
    for (uint32_t group = 0; group < GROUPS; group++) {
        int added = kvio_add_group(bench->engine, TENSORS, bases, strides, lengths[group], BLOCKS);
        CHECK(added == (int)group);
    }
    memset(bench->slots, 0, sizeof bench->slots);
    memset(bench->lanes, 0, sizeof bench->lanes);
    bench->busy = 0;
    atomic_store(&bench->ended, false);
}

static void run_engine(struct bench *bench, uint32_t io_path, bool drain) {
    pthread_t other;
    open_engine(bench, io_path);
    CHECK(pthread_create(&other, NULL, interfere, bench) == 0);
    for (uint32_t step = 0; step < STEPS; step++) {
        submit_some(bench);
        if (bench->busy)
            poll_events(bench);
    }
    while (drain && bench->busy)
        poll_events(bench);
    atomic_store(&bench->ended, true);
    pthread_join(other, NULL);
    if (faulty && drain)
        CHECK(kvio_faulty_crash(bench->engine, 0) == 0);
    if (!drain) /* with as much outstanding as there can be */
        submit_some(bench);
    kvio_destroy(bench->engine);
}

/* What is refused leaves nothing behind, nor half an engine to be used. */
static void be_refused(const struct bench *bench) {
    kvio_config config = {.slot_bytes = SLOT_BYTES,
                          .store_buffers = 2,
                          .queue_entries = 4,
                          .staging_numa_node = 4000};
    kvio *engine = NULL;
    kvio_arena arena;
    CHECK(kvio_create(&config, &engine) == -EINVAL && !engine);
    CHECK(kvio_arena_map(UINT64_C(1) << 46, -1, &arena) == -ENOMEM);
    config.staging_numa_node = -1;
    CHECK(kvio_create(&config, &engine) == 0);
    kvio_device_config device = {.kind = KVIO_DEVICE_FILE,
                                 .fd = bench->fds[0],
                                 .depth = 1,
                                 .threads = 1,
                                 .numa_node = 4000,
                                 .length = SLOT_BYTES};
    CHECK(kvio_add_device(engine, &device) == -EINVAL);
    device.numa_node = 0;
    CHECK(kvio_add_device(engine, &device) == 0);
    uint64_t base = 0;
    uint32_t length = SLOT_BYTES + 1;
    CHECK(kvio_add_group(engine, 1, &base, &base, &length, 1) == -EINVAL);
    kvio_op op = {.length = SLOT_BYTES};
    CHECK(kvio_submit(engine, &op, 1, NULL, 0) == -EINVAL);
    kvio_destroy(engine);
}

/* Every kind of fault, on raw writes and reads of every slot, and a crash after them. */
static void break_everything(const struct bench *bench, uint32_t kind) {
    bool write_only =
        kind == KVIO_FAULT_TORN || kind == KVIO_FAULT_STALE || kind == KVIO_FAULT_FULL;
    kvio_config config = {
        .slot_bytes = SLOT_BYTES, .queue_entries = SLOTS, .staging_numa_node = -1};
    kvio_device_config device = {.kind = KVIO_DEVICE_FILE, .fd = bench->fds[0], .numa_node = -1};
    device.depth = device.threads = 3;
    device.length = (uint64_t)SLOTS * SLOT_BYTES;
    kvio_fault_rule rule = {.kind = kind, .every = 1, .unit = SLOT_BYTES, .delay_us = 10};
    rule.directions = KVIO_FAULT_WRITES | (write_only ? 0 : KVIO_FAULT_READS);
    rule.probability = kind == KVIO_FAULT_STUCK ? 0 : KVIO_FAULT_ALWAYS;
    kvio_fault_script script = {seed, 16 * SLOT_BYTES, &rule, 1};
    kvio *engine;
    CHECK(kvio_create(&config, &engine) == 0);
    CHECK(kvio_add_faulty_device(engine, &device, &script) == 0);
    for (uint32_t operation = KVIO_WRITE; operation >= KVIO_READ; operation--) {
        for (uint32_t i = 0; i < SLOTS; i++) {
            kvio_op op = {.kind = operation, .offset = (uint64_t)i * SLOT_BYTES};
            op.length = SLOT_BYTES;
            op.buffer = (uint8_t *)bench->buffers.memory + op.offset;
            CHECK(kvio_submit(engine, &op, 1, NULL, 0) == 0);
        }
        kvio_event events[SLOTS];
        for (int done = 0; done < SLOTS; done += kvio_poll(engine, events, SLOTS))
            CHECK(kvio_wait(engine, 10000000) == 1);
    }
    CHECK(kvio_faulty_crash(engine, 0) == 0);
    kvio_destroy(engine);
}

static int open_file(const char *directory, int number) {
    char path[4096];
    snprintf(path, sizeof path, "%s/stress-%d-%d", directory, (int)getpid(), number);
    int fd = open(path, O_RDWR | O_CREAT | O_DIRECT, 0600);
    if (fd < 0)
        fd = open(path, O_RDWR | O_CREAT, 0600); /* a file system without O_DIRECT */
    CHECK(fd >= 0 && ftruncate(fd, (off_t)SLOTS * SLOT_BYTES) == 0);
    unlink(path);
    return fd;
}

int main(int argc, char **argv) {
    static struct bench bench;
    if (argc < 3)
        return 2;
    faulty = strcmp(argv[2], "faulty") == 0;
    uint32_t io_path = strcmp(argv[2], "uring") == 0 ? KVIO_IO_URING : KVIO_IO_THREADS;
    seed = argc > 3 ? strtoull(argv[3], NULL, 0) : (uint64_t)time(NULL);
    state = seed * UINT64_C(0x9E3779B97F4A7C15) | 1;
    for (int i = 0; i < 2; i++) {
        bench.fds[i] = open_file(argv[1], i);
        CHECK(kvio_arena_map((uint64_t)SLOTS * SLOT_BYTES, -1, &bench.modules[i]) == 0);
    }
    CHECK(kvio_arena_map((uint64_t)TENSORS * LANES * BLOCKS * 32768, -1, &bench.pages) == 0);
    CHECK(kvio_arena_map((uint64_t)LANES * SLOT_BYTES, -1, &bench.buffers) == 0);
    be_refused(&bench);
    for (uint32_t kind = 0; faulty && kind < KVIO_FAULT_LOST; kind++)
        break_everything(&bench, kind);
    for (int i = 0; i < ENGINES; i++)
        run_engine(&bench, io_path, i % 2 == 0);
    for (int i = 0; i < 2; i++) {
        close(bench.fds[i]);
        CHECK(kvio_arena_unmap(&bench.modules[i]) == 0);
    }
    CHECK(kvio_arena_unmap(&bench.pages) == 0 && kvio_arena_unmap(&bench.buffers) == 0);
    printf("seed %" PRIu64 "\n", seed);
    return 0;
}
