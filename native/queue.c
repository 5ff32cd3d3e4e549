/* SPDX-License-Identifier: Apache-2.0
 * The queues of a device, in what order they are served, and what is counted on the way.
 */
#include "internal.h"
#include <errno.h>

void list_append(struct op_list *list, struct op *op) {
    op->next = NULL;
    if (list->last)
        list->last->next = op;
    else
        list->first = op;
    list->last = op;
    list->count++;
}

struct op *list_pop(struct op_list *list) {
    struct op *op = list->first;
    if (!op)
        return NULL;
    list->first = op->next;
    if (!list->first)
        list->last = NULL;
    list->count--;
    return op;
}

static void list_join(struct op_list *list, struct op_list *tail) {
    if (!tail->first)
        return;
    if (list->last)
        list->last->next = tail->first;
    else
        list->first = tail->first;
    list->last = tail->last;
    list->count += tail->count;
    *tail = (struct op_list){0};
}

enum op_class op_class(const kvio_op *request) {
    uint32_t kind = request->kind;
    return kind == KVIO_LOAD || kind == KVIO_READ ? CLASS_LOAD : CLASS_STORE;
}

uint64_t media_bytes(const kvio_op *request) {
    return ((uint64_t)request->length + KVIO_ALIGN - 1) / KVIO_ALIGN * KVIO_ALIGN;
}

/* ---- counting; everything under the device's lock ---- */

/* More loads are there than the device works on at once, and no write takes its time: only then a
 * rate says what the device can do. */
static bool saturated(const struct device *device) {
    if (!device->running[CLASS_LOAD] || device->running[CLASS_STORE])
        return false;
    if (device->parallel_loads)
        return device->pending[CLASS_LOAD] >= device->parallel_loads;
    return device->lists[LIST_LOADS].count > 0;
}

/* Call before anything that these times depend on changes. */
static void meter_advance(struct device *device, uint64_t now_ns) {
    struct meter *meter = &device->meter;
    uint64_t passed_ns = now_ns > meter->advanced_ns ? now_ns - meter->advanced_ns : 0;
    meter->advanced_ns += passed_ns;
    if (device->running[CLASS_LOAD])
        meter->statistics.read_busy_ns += passed_ns;
    if (device->running[CLASS_STORE])
        meter->statistics.write_busy_ns += passed_ns;
    if (saturated(device))
        meter->statistics.saturated_read_ns += passed_ns;
}

static void count_result(struct device *device, const struct op *op) {
    kvio_statistics *statistics = &device->meter.statistics;
    bool load = op_class(&op->request) == CLASS_LOAD;
    uint64_t moved = op->result < 0 ? 0 : op->request.length;
    *(load ? &statistics->bytes_read : &statistics->bytes_written) += moved;
    if (load && saturated(device))
        statistics->saturated_read_bytes += moved;
    if (op->result == -EBADMSG)
        statistics->checksum_failures++;
    else if (op->result < 0 && op->result != -ECANCELED)
        ++*(load ? &statistics->read_failures : &statistics->write_failures);
}

void queue_statistics(struct device *device, kvio_statistics *statistics) {
    pthread_mutex_lock(&device->lock);
    meter_advance(device, clock_ns());
    *statistics = device->meter.statistics;
    statistics->queue_depth = device->pending[CLASS_LOAD] + device->pending[CLASS_STORE];
    pthread_mutex_unlock(&device->lock);
}

/* ---- in ---- */
void queue_push(struct device *device, struct op_list lists[LISTS]) {
    pthread_mutex_lock(&device->lock);
    meter_advance(device, clock_ns());
    for (int i = 0; i < LISTS; i++) {
        device->pending[i == LIST_LOADS ? CLASS_LOAD : CLASS_STORE] += lists[i].count;
        list_join(&device->lists[i], &lists[i]);
    }
    pthread_mutex_unlock(&device->lock);
}

void queue_push_write(struct device *device, struct op *op) {
    pthread_mutex_lock(&device->lock);
    list_append(&device->lists[LIST_WRITES], op);
    pthread_mutex_unlock(&device->lock);
}

/* ---- out ---- */

/* What is written at once is one chunk, be it in small parts: a load waits for no more. */
static bool write_fits(const struct device *device, const struct op *op) {
    uint64_t sum = device->writing_bytes + media_bytes(&op->request);
    return !device->backend->stages_stores || !device->writing_bytes ||
           sum <= device->engine->config.slot_bytes;
}

static bool may_start(struct device *device, enum queue_list list, unsigned wanted, uint64_t now_ns,
                      uint64_t *wake_ns) {
    struct op *op = device->lists[list].first;
    if (!op)
        return false;
    if (list == LIST_UNSTAGED)
        return staging_acquire(device, &op->slot);
    if (TAKE(list) & TAKE_WRITES) {
        bool load_waits = device->lists[LIST_LOADS].count && !(wanted & TAKE(LIST_LOADS));
        if (load_waits || !write_fits(device, op))
            return false;
    }
    return shape_admit(&device->shape, op, now_ns, wake_ns);
}

struct op *queue_take(struct device *device, unsigned wanted, uint64_t *wake_ns) {
    uint64_t now_ns = clock_ns();
    if (device->stopping)
        return NULL;
    for (int list = 0; list < LISTS; list++) {
        if (!(wanted & TAKE(list)) ||
            !may_start(device, (enum queue_list)list, wanted, now_ns, wake_ns))
            continue;
        meter_advance(device, now_ns);
        struct op *op = list_pop(&device->lists[list]);
        op->list = (enum queue_list)list;
        if (op->request.kind == KVIO_LOAD)
            op->load = LOAD_IS_READ;
        if (list != LIST_UNSTAGED)
            device->running[op_class(&op->request)]++;
        if (TAKE(list) & TAKE_WRITES)
            device->writing_bytes += media_bytes(&op->request);
        return op;
    }
    return NULL;
}

static void push_done(struct device *device, struct op *op, uint64_t now_ns) {
    op->done.event = (kvio_event){.tag = op->request.tag,
                                  .nanoseconds = now_ns - op->submitted_ns,
                                  .result = op->result,
                                  .crc = op->crc,
                                  .kind = KVIO_EVENT_DONE,
                                  .kept = op->kept};
    events_push(device->engine, &op->done);
}

void op_complete(struct device *device, struct op *op, uint64_t now_ns) {
    enum op_class which = op_class(&op->request);
    pthread_mutex_lock(&device->lock);
    meter_advance(device, now_ns);
    count_result(device, op);
    device->running[which]--;
    device->pending[which]--;
    op->load = LOAD_ENDED;
    pthread_mutex_unlock(&device->lock);
    push_done(device, op, now_ns);
}

void op_finish(struct device *device, struct op *op, int result) {
    op->result = result;
    pthread_mutex_lock(&device->lock);
    if (TAKE(op->list) & TAKE_WRITES)
        device->writing_bytes -= media_bytes(&op->request);
    op->due_ns = shape_due(&device->shape, op);
    bool deferred = op->due_ns > clock_ns();
    if (deferred) /* with the device locked, lest the shape changes in between */
        timer_defer(device, op);
    pthread_mutex_unlock(&device->lock);
    if (!deferred)
        op_complete(device, op, clock_ns());
}

int queue_cancel(struct device *device, uint64_t first_tag, uint64_t last_tag) {
    enum queue_list unstaged = device->backend->stages_stores ? LIST_UNSTAGED : LIST_WRITES;
    struct op_list kept = {0}, dropped = {0};
    pthread_mutex_lock(&device->lock);
    meter_advance(device, clock_ns());
    for (struct op *op; (op = list_pop(&device->lists[unstaged]));) {
        const kvio_op *request = &op->request;
        bool drop =
            request->kind == KVIO_STORE && request->tag >= first_tag && request->tag <= last_tag;
        list_append(drop ? &dropped : &kept, op);
    }
    device->lists[unstaged] = kept;
    device->pending[CLASS_STORE] -= dropped.count;
    pthread_mutex_unlock(&device->lock);
    int count = (int)dropped.count;
    for (struct op *op; (op = list_pop(&dropped));) {
        op->result = -ECANCELED;
        push_done(device, op, clock_ns());
    }
    return count;
}

bool load_may_scatter(struct device *device, struct op *op) {
    pthread_mutex_lock(&device->lock);
    bool may = op->load == LOAD_IS_READ;
    if (may)
        op->load = LOAD_IS_SCATTERED;
    pthread_mutex_unlock(&device->lock);
    return may;
}

static uint32_t abandon_what_is_read(struct device *device) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < device->records_used; i++) {
        struct op *op = &device->records[i];
        if (op->load != LOAD_IS_READ)
            continue;
        op->load = LOAD_IS_ABANDONED;
        op->staged.event = (kvio_event){.tag = op->request.tag,
                                        .nanoseconds = clock_ns() - op->submitted_ns,
                                        .result = -ETIMEDOUT,
                                        .kind = KVIO_EVENT_ABANDONED};
        events_push(device->engine, &op->staged);
        count++;
    }
    return count;
}

int queue_abandon_loads(struct device *device) {
    pthread_mutex_lock(&device->lock);
    meter_advance(device, clock_ns());
    struct op_list queued = device->lists[LIST_LOADS];
    device->lists[LIST_LOADS] = (struct op_list){0};
    device->pending[CLASS_LOAD] -= queued.count;
    uint32_t count = queued.count + abandon_what_is_read(device);
    pthread_mutex_unlock(&device->lock);
    for (struct op *op; (op = list_pop(&queued));) {
        op->result = -ETIMEDOUT;
        op->load = LOAD_ENDED;
        push_done(device, op, clock_ns());
    }
    return (int)count;
}
