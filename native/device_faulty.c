/* SPDX-License-Identifier: Apache-2.0
 * A file device that fails as a script says. It has the queues, threads and transfers of
 * device_threads.c; only what a transfer does to the medium is different.
 */
#include "internal.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define RULES_MAX 64u
#define SECTOR 512u
#define CRASH_SALT UINT64_C(0xC7A5485A17)

/* A write that no sync has followed: what was there, then what was written. */
struct unsynced {
    struct unsynced *older, *newer;
    uint64_t number; /* of its operation */
    struct extent extent;
    uint8_t *content; /* 2 * extent.length */
};

struct faults {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint64_t seed, rule_count, releases;
    uint64_t counts[KVIO_FAULT_KINDS];
    kvio_fault_rule rules[RULES_MAX];
    bool closing;

    pthread_mutex_t log_lock; /* all below; held while the medium is written */
    uint64_t log_bytes, log_bytes_max;
    struct unsynced *oldest, *newest;
};

/* ---- scripts ---- */
static bool rule_is_valid(const kvio_fault_rule *rule) {
    uint32_t both = KVIO_FAULT_READS | KVIO_FAULT_WRITES, kind = rule->kind;
    if (kind >= KVIO_FAULT_LOST || !rule->directions || rule->directions & ~both ||
        rule->probability > KVIO_FAULT_ALWAYS)
        return false;
    if (kind == KVIO_FAULT_TORN || kind == KVIO_FAULT_STALE || kind == KVIO_FAULT_FULL)
        return rule->directions == KVIO_FAULT_WRITES;
    if (kind == KVIO_FAULT_MISDIRECTED)
        return rule->unit && rule->unit % KVIO_ALIGN == 0 && rule->first_offset % KVIO_ALIGN == 0;
    return true;
}

static bool script_is_valid(const kvio_fault_script *script) {
    if (script->rule_count > RULES_MAX || (script->rule_count && !script->rules))
        return false;
    for (uint64_t i = 0; i < script->rule_count; i++)
        if (!rule_is_valid(&script->rules[i]))
            return false;
    return true;
}

static void log_shrink(struct faults *faults, uint64_t bytes) {
    while (faults->oldest && faults->log_bytes > bytes) {
        struct unsynced *landed = faults->oldest;
        faults->oldest = landed->newer;
        *(landed->newer ? &landed->newer->older : &faults->newest) = NULL;
        faults->log_bytes -= landed->extent.length;
        free(landed->content);
        free(landed);
    }
}

static void script_set(struct faults *faults, const kvio_fault_script *script) {
    pthread_mutex_lock(&faults->lock);
    faults->seed = script->seed;
    faults->rule_count = script->rule_count;
    if (script->rule_count)
        memcpy(faults->rules, script->rules, script->rule_count * sizeof *script->rules);
    pthread_mutex_unlock(&faults->lock);
    pthread_mutex_lock(&faults->log_lock);
    faults->log_bytes_max = script->volatile_bytes;
    log_shrink(faults, script->volatile_bytes);
    pthread_mutex_unlock(&faults->log_lock);
}

int faults_create(const kvio_fault_script *script, struct faults **faults) {
    if (!script_is_valid(script))
        return -EINVAL;
    struct faults *created = calloc(1, sizeof *created);
    if (!created)
        return -ENOMEM;
    int result = condition_create(&created->changed);
    if (result < 0) {
        free(created);
        return result;
    }
    pthread_mutex_init(&created->lock, NULL);
    pthread_mutex_init(&created->log_lock, NULL);
    script_set(created, script);
    *faults = created;
    return 0;
}

void faults_destroy(struct faults *faults) {
    if (!faults)
        return;
    log_shrink(faults, 0);
    pthread_mutex_destroy(&faults->log_lock);
    pthread_mutex_destroy(&faults->lock);
    pthread_cond_destroy(&faults->changed);
    free(faults);
}

/* ---- what happens to an operation ---- */
struct fault {
    kvio_fault_rule rule;
    uint64_t random;
};

static uint64_t mix(uint64_t value) { /* SplitMix64 */
    value += UINT64_C(0x9E3779B97F4A7C15);
    value = (value ^ value >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    value = (value ^ value >> 27) * UINT64_C(0x94D049BB133111EB);
    return value ^ value >> 31;
}

static bool rule_hits(const kvio_fault_rule *rule, const struct op *op, uint64_t random) {
    bool write = op_class(&op->request) == CLASS_STORE;
    uint64_t offset = op->request.offset, number = op->number;
    if (!(rule->directions & (write ? KVIO_FAULT_WRITES : KVIO_FAULT_READS)))
        return false;
    if (offset < rule->first_offset || (rule->end_offset && offset >= rule->end_offset))
        return false;
    if (number < rule->first ||
        (rule->every ? (number - rule->first) % rule->every != 0 : number != rule->first))
        return false;
    return random % KVIO_FAULT_ALWAYS < rule->probability;
}

static bool misdirect(const struct device *device, const struct op *op, const struct fault *fault,
                      uint64_t *offset) {
    uint64_t end = device->config.length, first = fault->rule.first_offset;
    if (fault->rule.end_offset && fault->rule.end_offset < end)
        end = fault->rule.end_offset;
    uint64_t length = media_bytes(&op->request), unit = fault->rule.unit;
    if (first > end || end - first < length)
        return false;
    uint64_t places = (end - first - length) / unit + 1;
    uint64_t place = (fault->random >> 16) % places;
    if (first + place * unit == op->request.offset)
        place = (place + 1) % places;
    *offset = first + place * unit;
    return *offset != op->request.offset;
}

/* Where no rule hits, or what it asks for cannot be, the kind is KVIO_FAULT_KINDS. */
static struct fault fault_choose(const struct device *device, const struct op *op) {
    struct faults *faults = device->faults;
    struct fault fault = {.rule.kind = KVIO_FAULT_KINDS};
    uint64_t class = op_class(&op->request), place;
    pthread_mutex_lock(&faults->lock);
    for (uint64_t i = 0; i < faults->rule_count; i++) {
        uint64_t random = mix(mix(faults->seed + i) ^ (op->number * CLASSES + class));
        if (!rule_hits(&faults->rules[i], op, random))
            continue;
        fault = (struct fault){faults->rules[i], mix(random)};
        break;
    }
    if (fault.rule.kind == KVIO_FAULT_MISDIRECTED && !misdirect(device, op, &fault, &place))
        fault.rule.kind = KVIO_FAULT_KINDS;
    if (fault.rule.kind != KVIO_FAULT_KINDS)
        faults->counts[fault.rule.kind]++;
    pthread_mutex_unlock(&faults->lock);
    return fault;
}

/* ---- the medium: a file, and a log of the writes that a crash may undo ---- */
static struct unsynced *unsynced_create(int fd, const struct extent *extent, const uint8_t *memory,
                                        uint64_t number) {
    struct unsynced *write = calloc(1, sizeof *write);
    uint64_t length = extent->length;
    if (!write)
        return NULL;
    *write = (struct unsynced){.number = number, .extent = *extent};
    write->extent.needed = 0;
    write->content = aligned_alloc(KVIO_ALIGN, 2 * length);
    if (write->content) {
        memset(write->content, 0, length);
        memcpy(write->content + length, memory, length);
    }
    if (!write->content || file_transfer(fd, &write->extent, write->content, false) < 0) {
        free(write->content);
        free(write);
        return NULL;
    }
    return write;
}

static int log_append(struct device *device, const struct extent *extent, const uint8_t *memory,
                      uint64_t number) {
    struct faults *faults = device->faults;
    struct unsynced *write = unsynced_create(device->config.fd, extent, memory, number);
    if (!write)
        return -ENOMEM;
    write->older = faults->newest;
    *(faults->newest ? &faults->newest->newer : &faults->oldest) = write;
    faults->newest = write;
    faults->log_bytes += extent->length;
    log_shrink(faults, faults->log_bytes_max);
    return 0;
}

static int medium_write(struct device *device, const struct op *op, const struct extent *extent,
                        uint8_t *memory) {
    struct faults *faults = device->faults;
    int result = 0;
    if (!extent->length)
        return 0;
    pthread_mutex_lock(&faults->log_lock);
    bool logged = faults->log_bytes_max > 0;
    if (logged) {
        result = log_append(device, extent, memory, op->number);
        if (result == 0)
            result = file_transfer(device->config.fd, extent, memory, true);
    }
    pthread_mutex_unlock(&faults->log_lock);
    return logged ? result : file_transfer(device->config.fd, extent, memory, true);
}

static int medium_move(struct device *device, const struct op *op, const struct extent *extent,
                       uint8_t *memory, bool write) {
    return write ? medium_write(device, op, extent, memory)
                 : file_transfer(device->config.fd, extent, memory, false);
}

/* ---- faults ---- */
static void hold(struct faults *faults, const kvio_fault_rule *rule) {
    uint64_t due_ns = clock_ns() + rule->delay_us * UINT64_C(1000);
    struct timespec due = timespec_of(due_ns);
    pthread_mutex_lock(&faults->lock);
    uint64_t releases = faults->releases;
    if (rule->kind == KVIO_FAULT_STUCK)
        while (!faults->closing && faults->releases == releases)
            pthread_cond_wait(&faults->changed, &faults->lock);
    else
        while (!faults->closing && clock_ns() < due_ns)
            pthread_cond_timedwait(&faults->changed, &faults->lock, &due);
    pthread_mutex_unlock(&faults->lock);
}

/* Less than all of it: whole pages, then -EIO. */
static int move_short(struct device *device, const struct op *op, uint8_t *memory, bool write,
                      uint64_t random) {
    struct extent extent = op_extent(op);
    extent.length = random % (extent.length / KVIO_ALIGN) * KVIO_ALIGN;
    extent.needed = 0;
    int result = medium_move(device, op, &extent, memory, write);
    return result < 0 ? result : -EIO;
}

/* Write `bytes` of one page from its start; the rest of it stays as it is on the medium. */
static int write_page(struct device *device, const struct op *op, uint64_t at,
                      const uint8_t *memory, uint64_t bytes) {
    _Alignas(KVIO_ALIGN) uint8_t page[KVIO_ALIGN] = {0};
    struct extent extent = {op->request.offset + at, KVIO_ALIGN, 0};
    int result = file_transfer(device->config.fd, &extent, page, false);
    if (result < 0)
        return result;
    memcpy(page, memory, bytes);
    return medium_write(device, op, &extent, page);
}

static int write_torn(struct device *device, const struct op *op, uint8_t *memory,
                      uint64_t random) {
    struct extent extent = op_extent(op);
    uint64_t landed = random % (extent.length / SECTOR) * SECTOR;
    uint64_t rest = landed % KVIO_ALIGN;
    extent.length = extent.needed = landed - rest;
    int result = medium_write(device, op, &extent, memory);
    if (result == 0 && rest)
        result = write_page(device, op, landed - rest, memory + landed - rest, rest);
    return result;
}

static int move_flipped(struct device *device, const struct op *op, uint8_t *memory, bool write,
                        uint64_t random) {
    struct extent extent = op_extent(op);
    uint64_t position = random % op->request.length, at = position % KVIO_ALIGN;
    uint8_t bit = (uint8_t)(1u << (random >> 56) % 8);
    int result = medium_move(device, op, &extent, memory, write);
    if (result < 0)
        return result;
    if (!write) {
        memory[position] ^= bit;
        return 0;
    }
    uint8_t page[KVIO_ALIGN];
    memcpy(page, memory + position - at, sizeof page);
    page[at] ^= bit;
    return write_page(device, op, position - at, page, sizeof page);
}

static int faulty_transfer(struct device *device, const struct op *op, uint8_t *memory,
                           bool write) {
    struct fault fault = fault_choose(device, op);
    struct extent extent = op_extent(op);
    switch (fault.rule.kind) {
    case KVIO_FAULT_ERROR:
        return -EIO;
    case KVIO_FAULT_FULL:
        return -ENOSPC;
    case KVIO_FAULT_STALE:
        return 0;
    case KVIO_FAULT_SHORT:
        return move_short(device, op, memory, write, fault.random);
    case KVIO_FAULT_TORN:
        return write_torn(device, op, memory, fault.random);
    case KVIO_FAULT_FLIPPED:
        return move_flipped(device, op, memory, write, fault.random);
    case KVIO_FAULT_MISDIRECTED:
        misdirect(device, op, &fault, &extent.offset);
        break;
    case KVIO_FAULT_SLOW:
    case KVIO_FAULT_STUCK:
        hold(device->faults, &fault.rule);
        break;
    }
    return medium_move(device, op, &extent, memory, write);
}

static void faulty_execute(struct device *device, struct op *op, uint8_t *buffer) {
    threads_serve(device, op, buffer, faulty_transfer);
}

static void let_go(struct faults *faults, bool closing) {
    pthread_mutex_lock(&faults->lock);
    faults->releases++;
    faults->closing |= closing;
    pthread_cond_broadcast(&faults->changed);
    pthread_mutex_unlock(&faults->lock);
}

static void faulty_stop(struct device *device) {
    let_go(device->faults, true);
    workers_stop(device);
}

const struct backend faulty_backend = {
    .io_path = KVIO_IO_THREADS,
    .stages_stores = true,
    .open = threads_open,
    .wake = workers_wake,
    .stop = faulty_stop,
    .close = workers_close,
    .execute = faulty_execute,
    .page_type = workers_page_type,
};

/* ---- what a test does to it ---- */
static struct device *find_faulty(const kvio *engine, uint32_t device) {
    bool there = engine && device < engine->device_count && engine->devices[device]->faults;
    return there ? engine->devices[device] : NULL;
}

int kvio_faulty_script(kvio *engine, uint32_t device, const kvio_fault_script *script) {
    const struct device *found = find_faulty(engine, device);
    if (!found || !script || !script_is_valid(script))
        return -EINVAL;
    script_set(found->faults, script);
    return 0;
}

int kvio_faulty_release(kvio *engine, uint32_t device) {
    const struct device *found = find_faulty(engine, device);
    if (!found)
        return -EINVAL;
    let_go(found->faults, false);
    return 0;
}

int kvio_faulty_sync(kvio *engine, uint32_t device) {
    const struct device *found = find_faulty(engine, device);
    if (!found)
        return -EINVAL;
    pthread_mutex_lock(&found->faults->log_lock);
    log_shrink(found->faults, 0);
    pthread_mutex_unlock(&found->faults->log_lock);
    return 0;
}

int kvio_faulty_counts(kvio *engine, uint32_t device, uint64_t counts[KVIO_FAULT_KINDS]) {
    const struct device *found = find_faulty(engine, device);
    if (!found || !counts)
        return -EINVAL;
    pthread_mutex_lock(&found->faults->lock);
    memcpy(counts, found->faults->counts, sizeof found->faults->counts);
    pthread_mutex_unlock(&found->faults->lock);
    return 0;
}

/* How much of a write lands at a crash: all, nothing, or some sectors from its start. */
static uint64_t landed_bytes(const struct unsynced *write, uint64_t seed) {
    uint64_t random = mix(mix(seed ^ CRASH_SALT) ^ write->number), length = write->extent.length;
    if (random % 3 == 0)
        return length;
    return random % 3 == 1 ? 0 : mix(random) % (length / SECTOR) * SECTOR;
}

static int land(int fd, struct unsynced *write, uint64_t bytes) {
    uint8_t *merged = write->content, *written = merged + write->extent.length;
    int result = file_transfer(fd, &write->extent, merged, false);
    if (result < 0)
        return result;
    memcpy(merged, written, bytes);
    return file_transfer(fd, &write->extent, merged, true);
}

/* Put back what was there, newest first; then let land what lands, oldest first. */
static int crash(struct device *device, uint64_t *lost) {
    const struct faults *faults = device->faults;
    int fd = device->config.fd, result = 0;
    for (struct unsynced *write = faults->newest; write && result == 0; write = write->older)
        result = file_transfer(fd, &write->extent, write->content, true);
    for (struct unsynced *write = faults->oldest; write && result == 0; write = write->newer) {
        uint64_t bytes = landed_bytes(write, faults->seed);
        *lost += bytes < write->extent.length;
        result = land(fd, write, bytes);
    }
    return result;
}

int kvio_faulty_crash(kvio *engine, uint32_t device) {
    struct device *found = find_faulty(engine, device);
    if (!found)
        return -EINVAL;
    pthread_mutex_lock(&found->lock);
    bool idle = !found->pending[CLASS_LOAD] && !found->pending[CLASS_STORE];
    pthread_mutex_unlock(&found->lock);
    if (!idle)
        return -EBUSY;
    struct faults *faults = found->faults;
    uint64_t lost = 0;
    pthread_mutex_lock(&faults->log_lock);
    int result = crash(found, &lost);
    log_shrink(faults, 0);
    pthread_mutex_unlock(&faults->log_lock);
    pthread_mutex_lock(&faults->lock);
    faults->counts[KVIO_FAULT_LOST] += lost;
    pthread_mutex_unlock(&faults->lock);
    return result;
}
