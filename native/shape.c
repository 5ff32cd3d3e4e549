/* SPDX-License-Identifier: Apache-2.0
 * A shaped device is a fluid server: an operation starts when all admitted before it is served, is
 * served at the rate, and is due a latency after that. Starts are reckoned on the shape's own
 * clock, not on when a thread came round to them, so delays of threads do not add up.
 */
#include "internal.h"

#define CATCH_UP_NS 20000000u /* how far service may lag behind the clock and still be made up */

static uint64_t later(uint64_t first, uint64_t second) { return first > second ? first : second; }

bool shape_admit(struct shape *shape, struct op *op, uint64_t now_ns, uint64_t *wake_ns) {
    struct bucket *bucket = &shape->bucket[op_class(&op->request)];
    op->admitted_ns = now_ns;
    if (!bucket->bytes_s) {
        op->due_ns = shape->latency_ns ? op->submitted_ns + shape->latency_ns : 0;
        return true;
    }
    uint64_t start_ns = later(bucket->free_ns, op->submitted_ns);
    if (start_ns > now_ns) {
        *wake_ns = *wake_ns < start_ns ? *wake_ns : start_ns;
        return false;
    }
    start_ns = later(start_ns, now_ns - CATCH_UP_NS);
    bucket->free_ns = start_ns + media_bytes(&op->request) * UINT64_C(1000000000) / bucket->bytes_s;
    op->due_ns = bucket->free_ns + shape->latency_ns;
    return true;
}

/* When an operation that is served is due, by the shape as it is now. */
uint64_t shape_due(const struct shape *shape, const struct op *op) {
    const struct bucket *bucket = &shape->bucket[op_class(&op->request)];
    uint64_t latest_ns = bucket->sped_up_ns + shape->latency_ns;
    return op->admitted_ns < bucket->sped_up_ns && latest_ns < op->due_ns ? latest_ns : op->due_ns;
}

/* What was admitted at a lower rate does not hold up what comes now. */
static void speed_up(struct device *device, enum op_class which, uint64_t now_ns) {
    struct shape *shape = &device->shape;
    if (shape->bucket[which].free_ns > now_ns)
        shape->bucket[which].free_ns = now_ns;
    shape->bucket[which].sped_up_ns = now_ns;
    timer_hasten(device, which, now_ns + shape->latency_ns);
}

int shape_set(struct device *device, uint64_t read_bytes_s, uint64_t write_bytes_s,
              uint32_t latency_us) {
    const uint64_t bytes_s[CLASSES] = {read_bytes_s, write_bytes_s};
    if (read_bytes_s || write_bytes_s || latency_us) {
        int result = timer_start(device->engine);
        if (result < 0)
            return result;
    }
    pthread_mutex_lock(&device->lock);
    device->shape.latency_ns = latency_us * UINT64_C(1000);
    for (int which = 0; which < CLASSES; which++) {
        uint64_t before = device->shape.bucket[which].bytes_s;
        device->shape.bucket[which].bytes_s = bytes_s[which];
        if (before && (!bytes_s[which] || bytes_s[which] > before))
            speed_up(device, (enum op_class)which, clock_ns());
    }
    pthread_mutex_unlock(&device->lock);
    return 0;
}
