/* SPDX-License-Identifier: Apache-2.0
 * One thread an engine, started with the first shaped device: it sleeps until the next operation
 * that was served is due, so that no device thread has to.
 */
#include "internal.h"

static void *timer_run(void *argument);

int timer_start(struct kvio *engine) {
    struct timer *timer = &engine->timer;
    if (timer->started)
        return 0;
    int result = condition_create(&timer->changed);
    if (result < 0)
        return result;
    result = thread_start(&timer->thread, "kvio-timer", timer_run, engine);
    if (result < 0)
        pthread_cond_destroy(&timer->changed);
    timer->started = result == 0;
    return result;
}

void timer_stop(struct kvio *engine) {
    struct timer *timer = &engine->timer;
    if (!timer->started)
        return;
    pthread_mutex_lock(&timer->lock);
    timer->stopping = true;
    pthread_cond_signal(&timer->changed);
    pthread_mutex_unlock(&timer->lock);
    pthread_join(timer->thread, NULL);
    pthread_cond_destroy(&timer->changed);
}

/* Operations of a class come nearly in the order of their due times. */
static void insert_by_due(struct op_list *list, struct op *op) {
    if (!list->first || list->last->due_ns <= op->due_ns) {
        list_append(list, op);
        return;
    }
    struct op **place = &list->first;
    while ((*place)->due_ns <= op->due_ns)
        place = &(*place)->next;
    op->next = *place;
    *place = op;
    list->count++;
}

void timer_defer(struct device *device, struct op *op) {
    struct timer *timer = &device->engine->timer;
    struct op_list *list = &device->deferred[op_class(&op->request)];
    pthread_mutex_lock(&timer->lock);
    insert_by_due(list, op);
    if (list->first == op)
        pthread_cond_signal(&timer->changed);
    pthread_mutex_unlock(&timer->lock);
}

/* What is due later becomes due then. */
void timer_hasten(struct device *device, enum op_class which, uint64_t due_ns) {
    struct timer *timer = &device->engine->timer;
    if (!timer->started)
        return;
    pthread_mutex_lock(&timer->lock);
    for (struct op *op = device->deferred[which].first; op; op = op->next)
        op->due_ns = op->due_ns < due_ns ? op->due_ns : due_ns;
    pthread_cond_signal(&timer->changed);
    pthread_mutex_unlock(&timer->lock);
}

static void take_due(struct kvio *engine, uint64_t now_ns, struct op_list *due, uint64_t *next_ns) {
    uint32_t count = atomic_load(&engine->device_count);
    for (uint32_t i = 0; i < count * CLASSES; i++) {
        struct op_list *list = &engine->devices[i / CLASSES]->deferred[i % CLASSES];
        while (list->first && list->first->due_ns <= now_ns)
            list_append(due, list_pop(list));
        if (list->first && list->first->due_ns < *next_ns)
            *next_ns = list->first->due_ns;
    }
}

static void *timer_run(void *argument) {
    struct kvio *engine = argument;
    struct timer *timer = &engine->timer;
    pthread_mutex_lock(&timer->lock);
    while (!timer->stopping) {
        struct op_list due = {0};
        uint64_t now_ns = clock_ns(), next_ns = NEVER;
        take_due(engine, now_ns, &due, &next_ns);
        if (due.first) {
            pthread_mutex_unlock(&timer->lock);
            for (struct op *op; (op = list_pop(&due));)
                op_complete(engine->devices[op->request.device], op, clock_ns());
            pthread_mutex_lock(&timer->lock);
        } else if (next_ns == NEVER) {
            pthread_cond_wait(&timer->changed, &timer->lock);
        } else {
            struct timespec until = timespec_of(next_ns);
            pthread_cond_timedwait(&timer->changed, &timer->lock, &until);
        }
    }
    pthread_mutex_unlock(&timer->lock);
    return NULL;
}
