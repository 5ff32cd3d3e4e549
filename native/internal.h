/* SPDX-License-Identifier: Apache-2.0
 * What the files of the engine share.
 *
 * An operation lives in a record of its device from kvio_submit until kvio_poll hands out its DONE
 * event. So records bound everything: queues are lists of records, events are nodes in records.
 *
 * Locks: api_lock (submit, poll, set-up) before device->lock before staging.lock or timer.lock.
 * The locks of device_faulty.c are taken with no other one held, and no other one under them.
 * Device threads never take api_lock. Nothing is called back with staging.lock or timer.lock held.
 */
#ifndef KVIO_INTERNAL_H
#define KVIO_INTERNAL_H
#include "kvio.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#define DEVICES_MAX 64u /* staging.waiting has a bit for each */
#define GROUPS_MAX 1024u
#define HUGE_BYTES (2u << 20)
#define NEVER UINT64_MAX

enum op_class { CLASS_LOAD = 0, CLASS_STORE = 1, CLASSES = 2 };

/* Queues of a device, in the order of their priority: nobody waits for a move. A STORE waits in
 * UNSTAGED where its device stages stores, else in WRITES like all others of its class. */
enum queue_list { LIST_LOADS, LIST_UNSTAGED, LIST_WRITES, LIST_MOVES, LISTS };
#define TAKE(list) (1u << (list))
#define TAKE_WRITES (TAKE(LIST_WRITES) | TAKE(LIST_MOVES))
#define TAKE_ANY (TAKE(LIST_LOADS) | TAKE(LIST_UNSTAGED) | TAKE_WRITES)

struct event_node {
    struct event_node *next;
    kvio_event event;
};

/* How far a LOAD is. One that is abandoned while it is read does not touch pages any more. */
enum load_state { LOAD_WAITS, LOAD_IS_READ, LOAD_IS_SCATTERED, LOAD_IS_ABANDONED, LOAD_ENDED };

struct op {
    struct op *next;
    kvio_op request;
    const struct group *group;
    int32_t *blocks;
    uint64_t number; /* among those of its device and class, from 0 */
    uint64_t submitted_ns;
    uint64_t admitted_ns; /* by the shape */
    uint64_t due_ns;      /* a shaped device completes it no earlier; 0: at once */
    int32_t result;
    uint32_t crc;
    uint32_t slot;        /* store staging slot, STORE on a device that stages */
    enum queue_list list; /* the queue it was taken from */
    bool kept;
    enum load_state load;     /* under the device's lock */
    struct event_node staged; /* pushed once at most, before `done`: STAGED or ABANDONED */
    struct event_node done;   /* pushed exactly once */
};

struct op_list {
    struct op *first, *last;
    uint32_t count;
};

/* ---- pages.c ---- */
struct group {
    uint32_t tensors, blocks_per_chunk;
    uint64_t block_bytes, payload_bytes;
    struct tensor {
        uint64_t base, stride;
        uint32_t length;
    } tensor[];
};
/* Copy between the pages of a chunk and its payload; both return the CRC32C of the payload. */
uint32_t pages_gather(const struct group *group, const int32_t *blocks, uint8_t *payload);
void pages_clear(const struct group *group, const int32_t *blocks);
uint32_t pages_scatter(const struct group *group, const int32_t *blocks, const uint8_t *payload,
                       bool unchecked);

/* ---- shape.c: a device that serves no faster than told ---- */
struct bucket {
    uint64_t bytes_s;    /* 0: as fast as it goes */
    uint64_t free_ns;    /* when all that was admitted is served */
    uint64_t sped_up_ns; /* what was admitted before is due a latency after this at the latest */
};
struct shape {
    struct bucket bucket[CLASSES];
    uint64_t latency_ns;
};
/* Whether the shape lets `op` start now; sets op->due_ns, or lowers *wake_ns to its start. */
bool shape_admit(struct shape *shape, struct op *op, uint64_t now_ns, uint64_t *wake_ns);
uint64_t shape_due(const struct shape *shape, const struct op *op);

/* ---- queue.c: queues, what is in flight, and what is counted ---- */
struct meter {
    uint64_t advanced_ns;
    kvio_statistics statistics;
};

struct backend;
struct device {
    struct kvio *engine;
    uint32_t index;
    const struct backend *backend;
    kvio_device_config config;
    void *state;             /* the backend's */
    struct faults *faults;   /* NULL: it has none */
    uint32_t parallel_loads; /* that a FILE device works on at once; 0: counts as none */

    /* Under api_lock: records. */
    struct op *records;
    int32_t *block_ids; /* block_stride for each record */
    uint32_t block_stride, records_used;
    struct op *free_records;
    uint64_t submitted[CLASSES]; /* since the start */
    uint32_t outstanding[CLASSES];
    uint32_t counting[CLASSES];     /* kvio_submit, while it checks its input */
    struct op_list incoming[LISTS]; /* kvio_submit, before they are queued */

    pthread_mutex_t lock; /* all below */
    struct op_list lists[LISTS];
    uint32_t pending[CLASSES]; /* queued or in flight */
    uint32_t running[CLASSES]; /* in flight */
    uint64_t writing_bytes;    /* on the way to the medium */
    bool stopping;
    struct shape shape;
    struct meter meter;
    struct op_list deferred[CLASSES]; /* under timer.lock: served, not due yet */
};

int shape_set(struct device *device, uint64_t read_bytes_s, uint64_t write_bytes_s,
              uint32_t latency_us);
void queue_push(struct device *device, struct op_list lists[LISTS]);
void queue_push_write(struct device *device, struct op *op); /* a store that is staged now */
/* The next operation of the lists in `wanted` (TAKE bits) that may start now, or NULL; then
 * *wake_ns is lowered to when a shape lets one start. Call with the device locked. */
struct op *queue_take(struct device *device, unsigned wanted, uint64_t *wake_ns);
int queue_cancel(struct device *device, uint64_t first_tag, uint64_t last_tag);
int queue_abandon_loads(struct device *device); /* under api_lock */
/* Called once when a LOAD's payload is there; false: it was abandoned, its pages are others'. */
bool load_may_scatter(struct device *device, struct op *op);
/* The operation is served; its DONE event follows when it is due. */
void op_finish(struct device *device, struct op *op, int result);
void op_complete(struct device *device, struct op *op, uint64_t now_ns);
void queue_statistics(struct device *device, kvio_statistics *statistics);
void list_append(struct op_list *list, struct op *op);
struct op *list_pop(struct op_list *list);
enum op_class op_class(const kvio_op *request);
uint64_t media_bytes(const kvio_op *request); /* its length as the medium sees it */

/* ---- chunk.c: what is done with a payload, whatever the device ---- */
int chunk_load(struct device *device, struct op *op, const uint8_t *payload);
void chunk_gather(struct device *device, struct op *op, uint8_t *payload); /* posts STAGED */
void chunk_stage(struct device *device, struct op *op); /* gathers to its slot, queues the write */
int chunk_check_move(struct op *op, const uint8_t *payload);
uint8_t *chunk_keep(const struct device *device, const struct op *op); /* its place on `keep` */
/* Where a write takes its bytes from: staging, the caller's buffer or a module. */
uint8_t *chunk_source(struct device *device, const struct op *op);

/* ---- staging.c: slots for stores, shared by all devices ---- */
struct staging {
    kvio_arena arena;
    pthread_mutex_t lock;
    uint32_t *free_slots, free_count;
    uint64_t waiting; /* devices to wake when a slot is free */
};
int staging_create(struct kvio *engine);
void staging_destroy(struct kvio *engine);
bool staging_acquire(struct device *device, uint32_t *slot);
void staging_release(struct kvio *engine, uint32_t slot);
uint8_t *staging_slot(const struct kvio *engine, uint32_t slot);

/* ---- timer.c: completes the operations of shaped devices when they are due ---- */
struct timer {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t thread;
    bool started, stopping;
};
int timer_start(struct kvio *engine);
void timer_stop(struct kvio *engine);
void timer_defer(struct device *device, struct op *op);
void timer_hasten(struct device *device, enum op_class which, uint64_t due_ns);

/* ---- events.c ---- */
struct events {
    _Atomic(struct event_node *) pushed; /* newest first, by any thread */
    _Atomic(struct event_node *) polled; /* oldest first, the poller's */
    int fd;
};
int events_create(struct kvio *engine);
void events_destroy(struct kvio *engine);
void events_push(struct kvio *engine, struct event_node *node);

/* ---- records.c ---- */
int records_create(struct device *device);
void records_destroy(struct device *device);
int records_grow_blocks(struct device *device, uint32_t blocks); /* -EBUSY with work outstanding */
struct op *record_take(struct device *device, const kvio_op *request);
void record_return(struct kvio *engine, struct op *op);

/* ---- backends: one constant table each ---- */
struct backend {
    enum kvio_io_path io_path; /* what kvio_device_io_path says; AUTO where it has no meaning */
    bool stages_stores;
    int (*open)(struct device *device);   /* allocate and start, or -errno and leave nothing */
    void (*wake)(struct device *device);  /* something was queued, a slot came free, or stopping */
    void (*stop)(struct device *device);  /* with `stopping` set: end what is in flight, join */
    void (*close)(struct device *device); /* after all devices have stopped: free */
    /* For backends on workers.c: run one operation. `buffer` is the thread's own. */
    void (*execute)(struct device *device, struct op *op, uint8_t *buffer);
    int (*page_type)(const struct device *device); /* of its staging; NULL: has none */
};
extern const struct backend memory_backend, nil_backend, threads_backend, uring_backend;
extern const struct backend faulty_backend;

/* ---- device_threads.c: the parts that a backend takes which wraps a file ---- */
struct extent {
    uint64_t offset, length;
    uint64_t needed; /* what lies past it is padding and may be missing at the end of the file */
};
typedef int transfer_call(struct device *device, const struct op *op, uint8_t *memory, bool write);
struct extent op_extent(const struct op *op);
int file_transfer(int fd, const struct extent *extent, uint8_t *memory, bool write);
int threads_open(struct device *device);
void threads_serve(struct device *device, struct op *op, uint8_t *buffer, transfer_call *move);

/* ---- device_faulty.c ---- */
int faults_create(const kvio_fault_script *script, struct faults **faults);
void faults_destroy(struct faults *faults); /* NULL: nothing */

/* ---- workers.c: a pool of threads that execute operations one by one ---- */
int workers_open(struct device *device, uint64_t buffer_bytes);
void workers_wake(struct device *device);
void workers_stop(struct device *device);
void workers_close(struct device *device);
int workers_page_type(const struct device *device);

/* ---- thread.c ---- */
uint64_t clock_ns(void);
struct timespec timespec_of(uint64_t nanoseconds);
int thread_start(pthread_t *thread, const char *name, void *(*run)(void *), void *argument);
void thread_bind(int32_t numa_node); /* the caller; a node without usable processors: not bound */
bool numa_node_exists(int32_t numa_node);
int condition_create(pthread_cond_t *condition); /* on CLOCK_MONOTONIC */

struct kvio {
    kvio_config config;
    pthread_mutex_t api_lock;
    struct device *devices[DEVICES_MAX];
    _Atomic uint32_t device_count;
    struct group *groups[GROUPS_MAX];
    uint32_t group_count, blocks_max;
    struct staging staging;
    struct timer timer;
    struct events events;
};
#endif
