/* SPDX-License-Identifier: Apache-2.0
 * An engine, its devices and groups: set up, asked, taken down.
 */
#include "internal.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>

#define SLOT_BYTES_MAX (UINT64_C(1) << 30) /* the kernel registers no larger buffer */
#define QUEUE_ENTRIES_MAX (1u << 20)
#define STORE_BUFFERS_MAX 8192u
#define DEPTH_MAX 1024u
#define THREADS_MAX 256u

uint64_t kvio_abi(void) {
    const uint64_t sizes[] = {sizeof(kvio_op),         sizeof(kvio_event),
                              sizeof(kvio_statistics), sizeof(kvio_device_config),
                              sizeof(kvio_config),     sizeof(kvio_arena)};
    uint64_t packed = 0;
    for (unsigned i = 0; i < sizeof sizes / sizeof *sizes; i++)
        packed |= sizes[i] << (8 * i);
    return packed;
}

static bool config_is_valid(const kvio_config *config) {
    return config->slot_bytes && config->slot_bytes % KVIO_ALIGN == 0 &&
           config->slot_bytes <= SLOT_BYTES_MAX && config->queue_entries &&
           config->queue_entries <= QUEUE_ENTRIES_MAX && config->store_buffers <= STORE_BUFFERS_MAX;
}

int kvio_create(const kvio_config *config, kvio **engine) {
    if (!config || !engine || !config_is_valid(config))
        return -EINVAL;
    struct kvio *created = calloc(1, sizeof *created);
    if (!created)
        return -ENOMEM;
    created->config = *config;
    int result = events_create(created);
    if (result < 0) {
        free(created);
        return result;
    }
    pthread_mutex_init(&created->api_lock, NULL);
    pthread_mutex_init(&created->staging.lock, NULL);
    pthread_mutex_init(&created->timer.lock, NULL);
    result = staging_create(created);
    if (result < 0) {
        kvio_destroy(created);
        return result;
    }
    *engine = created;
    return 0;
}

static void device_free(struct device *device) {
    records_destroy(device);
    faults_destroy(device->faults);
    pthread_mutex_destroy(&device->lock);
    free(device);
}

static void stop_devices(kvio *engine) {
    for (uint32_t i = 0; i < engine->device_count; i++) {
        struct device *device = engine->devices[i];
        pthread_mutex_lock(&device->lock);
        device->stopping = true;
        pthread_mutex_unlock(&device->lock);
    }
    for (uint32_t i = 0; i < engine->device_count; i++)
        engine->devices[i]->backend->stop(engine->devices[i]);
}

void kvio_destroy(kvio *engine) {
    if (!engine)
        return;
    stop_devices(engine);
    timer_stop(engine);
    for (uint32_t i = 0; i < engine->device_count; i++) {
        engine->devices[i]->backend->close(engine->devices[i]);
        device_free(engine->devices[i]);
    }
    for (uint32_t i = 0; i < engine->group_count; i++)
        free(engine->groups[i]);
    staging_destroy(engine);
    events_destroy(engine);
    pthread_mutex_destroy(&engine->timer.lock);
    pthread_mutex_destroy(&engine->staging.lock);
    pthread_mutex_destroy(&engine->api_lock);
    free(engine);
}

/* ---- devices ---- */
static int check_file(const kvio_device_config *config) {
    if (config->io_path > KVIO_IO_THREADS)
        return -EINVAL;
    if (config->depth == 0 || config->depth > DEPTH_MAX)
        return -EINVAL;
    return fcntl(config->fd, F_GETFL) < 0 ? -errno : 0;
}

static int check_device(const kvio_device_config *config) {
    if (!config->length || !config->threads || config->threads > THREADS_MAX)
        return -EINVAL;
    if (config->numa_node >= 0 && !numa_node_exists(config->numa_node))
        return -EINVAL;
    switch (config->kind) {
    case KVIO_DEVICE_MEMORY: /* a MOVE writes straight from it */
        return config->memory && (uintptr_t)config->memory % KVIO_ALIGN == 0 ? 0 : -EINVAL;
    case KVIO_DEVICE_FILE:
        return check_file(config);
    case KVIO_DEVICE_NIL:
        return 0;
    }
    return -EINVAL;
}

static int open_backend(struct device *device) {
    const struct backend *backend = &uring_backend;
    if (device->config.kind == KVIO_DEVICE_MEMORY)
        backend = &memory_backend;
    else if (device->config.kind == KVIO_DEVICE_NIL)
        backend = &nil_backend;
    else if (device->faults)
        backend = &faulty_backend;
    else if (device->config.io_path == KVIO_IO_THREADS)
        backend = &threads_backend;
    device->backend = backend;
    int result = backend->open(device);
    bool fall_back = backend == &uring_backend && device->config.io_path == KVIO_IO_AUTO;
    if (result >= 0 || !fall_back)
        return result;
    device->backend = &threads_backend;
    return threads_backend.open(device);
}

static int device_create(kvio *engine, const kvio_device_config *config, struct device *device) {
    device->engine = engine;
    device->index = engine->device_count;
    device->config = *config;
    device->meter.advanced_ns = clock_ns();
    int result = records_create(device);
    if (result < 0)
        return result;
    pthread_mutex_init(&device->lock, NULL);
    result = shape_set(device, config->shaped_read_bytes_s, config->shaped_write_bytes_s,
                       config->shaped_latency_us);
    if (result == 0) {
        engine->devices[device->index] = device; /* its own threads may look it up */
        result = open_backend(device);
    }
    if (result < 0) {
        records_destroy(device);
        pthread_mutex_destroy(&device->lock);
    }
    return result;
}

/* The faults become the device's where that is added. */
static int add_device(kvio *engine, const kvio_device_config *config, struct faults *faults) {
    struct device *device = calloc(1, sizeof *device);
    if (!device)
        return -ENOMEM;
    device->faults = faults;
    pthread_mutex_lock(&engine->api_lock);
    int result =
        engine->device_count < DEVICES_MAX ? device_create(engine, config, device) : -ENOSPC;
    if (result == 0)
        result = (int)engine->device_count++;
    else
        free(device);
    pthread_mutex_unlock(&engine->api_lock);
    return result;
}

int kvio_add_device(kvio *engine, const kvio_device_config *config) {
    if (!engine || !config)
        return -EINVAL;
    int result = check_device(config);
    return result < 0 ? result : add_device(engine, config, NULL);
}

int kvio_add_faulty_device(kvio *engine, const kvio_device_config *config,
                           const kvio_fault_script *script) {
    if (!engine || !config || !script || config->kind != KVIO_DEVICE_FILE)
        return -EINVAL;
    struct faults *faults;
    int result = check_device(config);
    if (result == 0)
        result = faults_create(script, &faults);
    if (result < 0)
        return result;
    result = add_device(engine, config, faults);
    if (result < 0)
        faults_destroy(faults);
    return result;
}

static struct device *find_device(const kvio *engine, uint32_t device) {
    return engine && device < engine->device_count ? engine->devices[device] : NULL;
}

int kvio_device_io_path(const kvio *engine, uint32_t device) {
    const struct device *found = find_device(engine, device);
    return found ? (int)found->backend->io_path : -EINVAL;
}

int kvio_set_shape(kvio *engine, uint32_t device, uint64_t read_bytes_s, uint64_t write_bytes_s,
                   uint32_t latency_us) {
    struct device *found = find_device(engine, device);
    if (!found)
        return -EINVAL;
    pthread_mutex_lock(&engine->api_lock); /* may start the timer */
    int result = shape_set(found, read_bytes_s, write_bytes_s, latency_us);
    pthread_mutex_unlock(&engine->api_lock);
    found->backend->wake(found);
    return result;
}

int kvio_device_statistics(const kvio *engine, uint32_t device, kvio_statistics *statistics) {
    struct device *found = find_device(engine, device);
    if (!found || !statistics)
        return -EINVAL;
    queue_statistics(found, statistics);
    return 0;
}

int kvio_abandon_loads(kvio *engine, uint32_t device) {
    struct device *found = find_device(engine, device);
    if (!found)
        return -EINVAL;
    pthread_mutex_lock(&engine->api_lock); /* records */
    int count = queue_abandon_loads(found);
    pthread_mutex_unlock(&engine->api_lock);
    return count;
}

int kvio_staging_page_type(const kvio *engine) {
    if (!engine)
        return -EINVAL;
    int worst = (int)engine->staging.arena.page_type;
    for (uint32_t i = 0; i < engine->device_count; i++) {
        const struct device *device = engine->devices[i];
        int type = device->backend->page_type ? device->backend->page_type(device) : 0;
        worst = type > worst ? type : worst;
    }
    return worst;
}

/* ---- groups ---- */
static struct group *group_create(uint32_t tensors, const uint64_t *bases, const uint64_t *strides,
                                  const uint32_t *lengths, uint32_t blocks_per_chunk) {
    struct group *group = calloc(1, sizeof *group + tensors * sizeof(struct tensor));
    if (!group)
        return NULL;
    group->tensors = tensors;
    group->blocks_per_chunk = blocks_per_chunk;
    for (uint32_t i = 0; i < tensors; i++) {
        group->tensor[i] = (struct tensor){bases[i], strides[i], lengths[i]};
        group->block_bytes += lengths[i];
    }
    group->payload_bytes = group->block_bytes * blocks_per_chunk;
    return group;
}

static int group_add(kvio *engine, struct group *group) {
    if (engine->group_count == GROUPS_MAX)
        return -ENOSPC;
    for (uint32_t i = 0; i < engine->device_count; i++) {
        int result = records_grow_blocks(engine->devices[i], group->blocks_per_chunk);
        if (result < 0)
            return result;
    }
    if (group->blocks_per_chunk > engine->blocks_max)
        engine->blocks_max = group->blocks_per_chunk;
    engine->groups[engine->group_count] = group;
    return (int)engine->group_count++;
}

int kvio_add_group(kvio *engine, uint32_t tensors, const uint64_t *bases, const uint64_t *strides,
                   const uint32_t *lengths, uint32_t blocks_per_chunk) {
    if (!engine || !tensors || !bases || !strides || !lengths || !blocks_per_chunk)
        return -EINVAL;
    uint64_t payload_bytes = 0;
    for (uint32_t i = 0; i < tensors; i++) {
        payload_bytes += (uint64_t)lengths[i] * blocks_per_chunk;
        if (!lengths[i] || payload_bytes > engine->config.slot_bytes)
            return -EINVAL;
    }
    struct group *group = group_create(tensors, bases, strides, lengths, blocks_per_chunk);
    if (!group)
        return -ENOMEM;
    pthread_mutex_lock(&engine->api_lock);
    int result = group_add(engine, group);
    pthread_mutex_unlock(&engine->api_lock);
    if (result < 0)
        free(group);
    return result;
}
