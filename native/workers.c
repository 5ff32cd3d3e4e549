/* SPDX-License-Identifier: Apache-2.0
 * A pool of threads that take operations from a device's queues and execute them one by one.
 */
#include "internal.h"
#include <errno.h>
#include <stdlib.h>

struct worker {
    struct device *device;
    pthread_t thread;
    uint8_t *buffer;
};

struct workers {
    pthread_cond_t ready;
    kvio_arena buffers;
    uint32_t count, idle; /* idle: under the device's lock */
    struct worker worker[];
};

static void wait_for_work(struct device *device, struct workers *workers, uint64_t wake_ns) {
    workers->idle++;
    if (wake_ns == NEVER) {
        pthread_cond_wait(&workers->ready, &device->lock);
    } else {
        struct timespec until = timespec_of(wake_ns);
        pthread_cond_timedwait(&workers->ready, &device->lock, &until);
    }
    workers->idle--;
}

static bool anything_queued(const struct device *device) {
    for (int i = 0; i < LISTS; i++)
        if (device->lists[i].count)
            return true;
    return false;
}

static void *worker_run(void *argument) {
    struct worker *worker = argument;
    struct device *device = worker->device;
    struct workers *workers = device->state;
    thread_bind(device->config.numa_node);
    pthread_mutex_lock(&device->lock);
    while (!device->stopping) {
        uint64_t wake_ns = NEVER;
        struct op *op = queue_take(device, TAKE_ANY, &wake_ns);
        if (!op) {
            wait_for_work(device, workers, wake_ns);
            continue;
        }
        if (workers->idle && anything_queued(device)) /* each wakes the next */
            pthread_cond_signal(&workers->ready);
        pthread_mutex_unlock(&device->lock);
        device->backend->execute(device, op, worker->buffer);
        pthread_mutex_lock(&device->lock);
    }
    pthread_mutex_unlock(&device->lock);
    return NULL;
}

static int start_threads(struct device *device, struct workers *workers, uint64_t buffer_bytes) {
    uint8_t *buffers = workers->buffers.memory;
    for (; workers->count < device->config.threads; workers->count++) {
        struct worker *worker = &workers->worker[workers->count];
        worker->device = device;
        worker->buffer = buffers ? buffers + workers->count * buffer_bytes : NULL;
        int result = thread_start(&worker->thread, "kvio-worker", worker_run, worker);
        if (result < 0)
            return result;
    }
    return 0;
}

int workers_open(struct device *device, uint64_t buffer_bytes) {
    const kvio_device_config *config = &device->config;
    struct workers *workers = calloc(1, sizeof *workers + config->threads * sizeof(struct worker));
    if (!workers)
        return -ENOMEM;
    int result = condition_create(&workers->ready);
    if (result < 0) {
        free(workers);
        return result;
    }
    device->state = workers;
    if (buffer_bytes)
        result =
            kvio_arena_map(config->threads * buffer_bytes, config->numa_node, &workers->buffers);
    if (result == 0)
        result = start_threads(device, workers, buffer_bytes);
    if (result < 0) {
        pthread_mutex_lock(&device->lock);
        device->stopping = true;
        pthread_mutex_unlock(&device->lock);
        workers_stop(device);
        workers_close(device);
    }
    return result;
}

void workers_wake(struct device *device) {
    struct workers *workers = device->state;
    pthread_mutex_lock(&device->lock);
    if (workers->idle)
        pthread_cond_signal(&workers->ready);
    pthread_mutex_unlock(&device->lock);
}

void workers_stop(struct device *device) {
    struct workers *workers = device->state;
    pthread_mutex_lock(&device->lock);
    pthread_cond_broadcast(&workers->ready);
    pthread_mutex_unlock(&device->lock);
    for (uint32_t i = 0; i < workers->count; i++)
        pthread_join(workers->worker[i].thread, NULL);
}

void workers_close(struct device *device) {
    struct workers *workers = device->state;
    if (workers->buffers.memory)
        kvio_arena_unmap(&workers->buffers);
    pthread_cond_destroy(&workers->ready);
    free(workers);
}

int workers_page_type(const struct device *device) {
    const struct workers *workers = device->state;
    return (int)workers->buffers.page_type;
}
