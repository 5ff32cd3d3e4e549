/* SPDX-License-Identifier: Apache-2.0
 * kvio: moves KV chunks between paged KV memory and storage devices. This header is the whole API.
 *
 * Conventions: every function returns >= 0 or -errno and prints nothing. One engine serves one
 * rank. A device has a queue and threads of its own; loads go before stores. All memory is
 * allocated by kvio_create and kvio_add_device, none while serving. Submit and poll from one thread
 * at a time.
 */
#ifndef KVIO_H
#define KVIO_H
#include <stddef.h>
#include <stdint.h>

#define KVIO_ALIGN 4096u /* alignment of offsets, staging and slots */
#define KVIO_NO_DEVICE UINT32_MAX

#pragma GCC visibility push(default)

typedef struct kvio kvio;

/* ---- memory: NUMA-bound, huge pages where they are to be had, faulted in ---- */
enum kvio_page_type { KVIO_PAGES_RESERVED = 0, KVIO_PAGES_TRANSPARENT = 1, KVIO_PAGES_PLAIN = 2 };
typedef struct {
    void *memory;
    uint64_t length;    /* as mapped: a multiple of 2 MiB */
    uint32_t page_type; /* enum kvio_page_type, checked against the kernel after faulting in */
    int32_t numa_node;  /* -1: not bound */
} kvio_arena;
int kvio_arena_map(uint64_t length, int32_t numa_node, kvio_arena *arena); /* -ENOMEM, -EINVAL */
int kvio_arena_unmap(kvio_arena *arena);

/* ---- checksums (CRC32C, Castagnoli; initial value 0 gives the standard checksum) ---- */
uint32_t kvio_crc32c(uint32_t crc, const void *data, uint64_t length);
uint32_t kvio_copy_crc32c(uint32_t crc, void *destination, const void *source, uint64_t length);

/* ---- engine ---- */
typedef struct {
    uint64_t slot_bytes;       /* largest payload, a multiple of KVIO_ALIGN */
    uint32_t store_buffers;    /* staging slots for stores, shared by all FILE devices */
    uint32_t queue_entries;    /* bound of operations a device and class (load, store) */
    int32_t staging_numa_node; /* -1: any */
} kvio_config;
int kvio_create(const kvio_config *config, kvio **engine);
/* Finishes what is in flight on devices, drops what is queued; no other call may be under way. */
void kvio_destroy(kvio *engine);
int kvio_eventfd(const kvio *engine);           /* readable while kvio_poll would return events */
int kvio_staging_page_type(const kvio *engine); /* the worst under any staging slots */

/* ---- devices ---- */
enum kvio_device_kind {
    KVIO_DEVICE_MEMORY = 0, /* a DRAM module: threads copy straight between `memory` and pages */
    KVIO_DEVICE_FILE = 1,   /* `fd` opened O_DIRECT by the caller, file or block device */
    KVIO_DEVICE_NIL = 2,    /* does nothing, at once: what the engine itself costs */
};
enum kvio_io_path { KVIO_IO_AUTO = 0, KVIO_IO_URING = 1, KVIO_IO_THREADS = 2 };
typedef struct {
    uint32_t kind;
    uint32_t io_path;  /* FILE only; AUTO tries io_uring and falls back to pread/pwrite threads */
    int32_t fd;        /* FILE only; stays the caller's */
    uint32_t depth;    /* transfers in flight on a FILE device; it stages in two slots more */
    uint32_t threads;  /* copying threads of a MEMORY device, I/O threads of the THREADS path */
    int32_t numa_node; /* threads and staging are bound there; -1: not bound */
    void *memory;      /* MEMORY only */
    uint64_t length;   /* bytes addressable through `offset` */
    /* A shaped device serves no faster than this (0: unshaped); for FILE, MEMORY and NIL. */
    uint64_t shaped_read_bytes_s, shaped_write_bytes_s;
    uint32_t shaped_latency_us;
} kvio_device_config;
int kvio_add_device(kvio *engine, const kvio_device_config *config); /* device index */
int kvio_device_io_path(const kvio *engine, uint32_t device);        /* what AUTO came to */
int kvio_set_shape(kvio *engine, uint32_t device, uint64_t read_bytes_s, uint64_t write_bytes_s,
                   uint32_t latency_us); /* while running */

/* ---- pages: where the chunks of a KV group lie in paged memory ----
 * Payload order: for each block of the chunk, for each tensor: `lengths[t]` bytes from
 * `bases[t] + block_id * strides[t]`. -EBUSY where longer chunks come while work is outstanding. */
int kvio_add_group(kvio *engine, uint32_t tensors, const uint64_t *bases, const uint64_t *strides,
                   const uint32_t *lengths, uint32_t blocks_per_chunk); /* group index */

/* ---- operations ---- */
enum kvio_op_kind {
    KVIO_LOAD = 0,  /* device -> staging -> verify -> pages of `blocks` [-> MEMORY device `keep`] */
    KVIO_STORE = 1, /* pages -> staging, checksum in the same pass (event STAGED) -> device */
    KVIO_MOVE = 2,  /* MEMORY device `keep` -> verify -> device; queued behind all stores */
    KVIO_READ = 3,  /* device -> `buffer` (aligned, `length` a multiple of KVIO_ALIGN), as a load */
    KVIO_WRITE = 4, /* `buffer` -> device, as a store */
};
/* LOAD, MOVE: -EBADMSG where the payload's CRC32C is not `crc`; the pages of such a LOAD are
 * zeroed. */
#define KVIO_FLAG_VERIFY 1u
/* LOAD, without VERIFY: no checksum is computed (the event's is 0); to measure what it costs. */
#define KVIO_FLAG_UNCHECKED 2u
typedef struct {
    uint64_t tag;         /* comes back in events */
    uint64_t offset;      /* on `device`, multiple of KVIO_ALIGN */
    uint64_t keep_offset; /* on `keep` */
    void *buffer;         /* READ, WRITE */
    uint32_t kind;
    uint32_t device;
    uint32_t keep; /* LOAD: MEMORY device that gets a copy, or KVIO_NO_DEVICE; MOVE: the source */
    uint32_t group;
    uint32_t length;      /* payload bytes; media transfers are rounded up to KVIO_ALIGN */
    uint32_t crc;         /* expected */
    uint32_t first_block; /* LOAD, STORE: index in `blocks` of blocks_per_chunk block ids; an id < 0
                             is skipped on load (verified all the same), refused on store */
    uint32_t flags;
} kvio_op;
/* Queues all or none: -EAGAIN where a class of a device would hold more than queue_entries
 * operations (one counts until kvio_poll has handed out its DONE event), -ENOBUFS for a STORE to a
 * FILE device without any store_buffers, -EINVAL for bad input. A STORE that finds the staging
 * slots taken waits for one while loads go on. On a FILE device no more than a slot's worth of
 * bytes is being written at a time, so that a load never waits for more. */
int kvio_submit(kvio *engine, const kvio_op *ops, uint32_t count, const int32_t *blocks,
                uint32_t block_count);
/* Drops stores whose pages are not staged yet (they end with -ECANCELED); a gather that runs is
 * finished. Returns how many were dropped. Tags in [first_tag, last_tag]. */
int kvio_cancel_stores(kvio *engine, uint64_t first_tag, uint64_t last_tag);
/* For a device that does not answer: its loads that wait end with -ETIMEDOUT; those that are being
 * read have an ABANDONED event and touch neither pages nor `keep` from then on. Those that are
 * being scattered go on. Returns how many will not be scattered. */
int kvio_abandon_loads(kvio *engine, uint32_t device);

enum kvio_event_kind { KVIO_EVENT_STAGED = 0, KVIO_EVENT_DONE = 1, KVIO_EVENT_ABANDONED = 2 };
typedef struct {
    uint64_t tag;
    uint64_t nanoseconds; /* from submission */
    int32_t result;       /* 0 or -errno; -EBADMSG: checksum, -EIO: end of file, -ECANCELED */
    uint32_t crc;         /* CRC32C of the payload: STORE (in both events), LOAD, MOVE */
    uint32_t kind;
    uint32_t kept; /* LOAD with `keep`: 1 where the copy was made */
} kvio_event;
/* Every op ends in exactly one DONE event; a STORE has one STAGED event before it unless it failed
 * earlier. Source pages of a store are free after STAGED or DONE. The DONE event of an abandoned
 * load comes when the device answers, if it does. */
int kvio_poll(kvio *engine, kvio_event *events, uint32_t capacity);
/* 1 when kvio_poll has something, 0 when the time is over or a signal came. */
int kvio_wait(kvio *engine, uint32_t timeout_us);

typedef struct {
    uint64_t bytes_read, bytes_written;   /* payload moved, since the start; copies to `keep` and
                                             reads by MOVE are not counted on the MEMORY device */
    uint64_t read_busy_ns, write_busy_ns; /* with at least one transfer in flight */
    /* Loads done, and time passed, while no write was in flight and more loads were there than the
     * device serves at once: `depth` (or `threads`) and more of them on a FILE, any waiting on
     * others. The rate of these says what the device can do. */
    uint64_t saturated_read_bytes, saturated_read_ns;
    uint64_t read_failures, write_failures, checksum_failures;
    uint32_t queue_depth, reserved; /* queued and in flight now */
} kvio_statistics;
int kvio_device_statistics(const kvio *engine, uint32_t device, kvio_statistics *statistics);

/* ---- faults: a FILE device on threads that fails as a script says; for tests ----
 * What happens to an operation follows from the seed and from its number among the reads (loads) or
 * the writes of its device, counted from 0 in the order of submission. The first rule that hits it
 * decides. */
enum kvio_fault_kind {
    KVIO_FAULT_ERROR = 0,   /* -EIO, nothing is moved */
    KVIO_FAULT_SHORT = 1,   /* a part from the start is moved, then -EIO */
    KVIO_FAULT_TORN = 2,    /* writes: success, a part (of whole sectors) from the start lands */
    KVIO_FAULT_FLIPPED = 3, /* a bit of the payload is another one: in memory, or on the medium */
    KVIO_FAULT_MISDIRECTED = 4, /* goes to, or comes from, another place in the rule's range */
    KVIO_FAULT_STALE = 5,       /* writes: success, nothing lands */
    KVIO_FAULT_SLOW = 6,        /* `delay_us` later than it could be */
    KVIO_FAULT_STUCK = 7,       /* not before kvio_faulty_release or kvio_destroy */
    KVIO_FAULT_FULL = 8,        /* writes: -ENOSPC */
    KVIO_FAULT_LOST = 9,        /* no rule: counts what kvio_faulty_crash undid or tore */
    KVIO_FAULT_KINDS = 10,
};
#define KVIO_FAULT_READS 1u
#define KVIO_FAULT_WRITES 2u
#define KVIO_FAULT_ALWAYS 65536u
typedef struct {
    uint64_t first_offset, end_offset; /* of operations that it can hit; an end of 0: no end */
    uint64_t unit;                     /* MISDIRECTED: places are first_offset + n * unit */
    uint64_t first, every; /* hits numbers first, first + every, ...; every 0: `first` alone */
    uint32_t kind;
    uint32_t directions;  /* KVIO_FAULT_READS | KVIO_FAULT_WRITES */
    uint32_t probability; /* of those numbers, in 1 / KVIO_FAULT_ALWAYS */
    uint32_t delay_us;    /* SLOW */
} kvio_fault_rule;
typedef struct {
    uint64_t seed;
    uint64_t volatile_bytes; /* unsynced writes that a crash may undo; older ones have landed */
    const kvio_fault_rule *rules;
    uint64_t rule_count; /* 64 at most */
} kvio_fault_script;
int kvio_add_faulty_device(kvio *engine, const kvio_device_config *config,
                           const kvio_fault_script *script); /* device index */
/* Another script from now on. All of these: -EINVAL for a device that is not faulty. */
int kvio_faulty_script(kvio *engine, uint32_t device, const kvio_fault_script *script);
int kvio_faulty_release(kvio *engine, uint32_t device); /* lets go on what is stuck now */
int kvio_faulty_sync(kvio *engine, uint32_t device);    /* all writes that are done have landed */
/* Each write since the last sync lands, vanishes or tears, by the seed. -EBUSY: not idle. */
int kvio_faulty_crash(kvio *engine, uint32_t device);
int kvio_faulty_counts(kvio *engine, uint32_t device, uint64_t counts[KVIO_FAULT_KINDS]);

/* Sizes of kvio_op, kvio_event, kvio_statistics, kvio_device_config, kvio_config and kvio_arena, a
 * byte each from the lowest: a binding compares them with its own. */
uint64_t kvio_abi(void);

#pragma GCC visibility pop

#endif
