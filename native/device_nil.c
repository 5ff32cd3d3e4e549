/* SPDX-License-Identifier: Apache-2.0
 * A device that moves nothing: every operation succeeds with the checksum that it expects.
 */
#include "internal.h"

static void nil_execute(struct device *device, struct op *op, uint8_t *buffer) {
    (void)buffer;
    op->crc = op->request.crc;
    if (op->request.kind == KVIO_STORE) {
        op->staged.event = (kvio_event){.tag = op->request.tag,
                                        .nanoseconds = clock_ns() - op->submitted_ns,
                                        .crc = op->crc,
                                        .kind = KVIO_EVENT_STAGED};
        events_push(device->engine, &op->staged);
    }
    op_finish(device, op, 0);
}

static int nil_open(struct device *device) { return workers_open(device, 0); }

const struct backend nil_backend = {
    .open = nil_open,
    .wake = workers_wake,
    .stop = workers_stop,
    .close = workers_close,
    .execute = nil_execute,
};
