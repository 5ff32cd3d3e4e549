/* SPDX-License-Identifier: Apache-2.0
 * Events: device threads push nodes onto a lock-free stack, the poller takes the whole stack and
 * turns it round. A node is part of its operation's record, so there is always room.
 */
#include "internal.h"
#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

int events_create(struct kvio *engine) {
    engine->events.fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    return engine->events.fd < 0 ? -errno : 0;
}

void events_destroy(struct kvio *engine) { close(engine->events.fd); }

static void make_readable(struct events *events) { (void)!eventfd_write(events->fd, 1); }

static void make_unreadable(struct events *events) {
    eventfd_t count;
    (void)!eventfd_read(events->fd, &count);
}

void events_push(struct kvio *engine, struct event_node *node) {
    struct events *events = &engine->events;
    struct event_node *newest = atomic_load_explicit(&events->pushed, memory_order_relaxed);
    do {
        node->next = newest;
    } while (!atomic_compare_exchange_weak(&events->pushed, &newest, node));
    if (!newest) /* the first one since the poller came by */
        make_readable(events);
}

/* Everything pushed, oldest first. */
static struct event_node *take_pushed(struct events *events) {
    struct event_node *node = atomic_exchange(&events->pushed, NULL), *oldest = NULL;
    while (node) {
        struct event_node *next = node->next;
        node->next = oldest;
        oldest = node;
        node = next;
    }
    return oldest;
}

/* Moves events from the list behind the `count` that are there; returns how many that makes. */
static uint32_t hand_out(struct kvio *engine, struct event_node **list, kvio_event *events,
                         uint32_t count, uint32_t capacity) {
    struct event_node *node = *list;
    while (node && count < capacity) {
        struct event_node *next = node->next;
        events[count++] = node->event;
        if (node->event.kind == KVIO_EVENT_DONE)
            record_return(engine, (struct op *)((char *)node - offsetof(struct op, done)));
        node = next;
    }
    *list = node;
    return count;
}

int kvio_poll(kvio *engine, kvio_event *events, uint32_t capacity) {
    if (!engine || (capacity && !events))
        return -EINVAL;
    pthread_mutex_lock(&engine->api_lock);
    struct event_node *list = atomic_load(&engine->events.polled);
    uint32_t count = hand_out(engine, &list, events, 0, capacity);
    if (!list) { /* unreadable first: a push from here on makes it readable again */
        make_unreadable(&engine->events);
        list = take_pushed(&engine->events);
        count = hand_out(engine, &list, events, count, capacity);
        if (list)
            make_readable(&engine->events);
    }
    atomic_store(&engine->events.polled, list);
    pthread_mutex_unlock(&engine->api_lock);
    return (int)count;
}

static bool events_wait_to_be_polled(struct events *events) {
    return atomic_load(&events->polled) || atomic_load(&events->pushed);
}

int kvio_wait(kvio *engine, uint32_t timeout_us) {
    if (!engine)
        return -EINVAL;
    struct events *events = &engine->events;
    uint64_t end_ns = clock_ns() + timeout_us * UINT64_C(1000), now_ns;
    while (!events_wait_to_be_polled(events)) {
        now_ns = clock_ns();
        if (now_ns >= end_ns)
            return 0;
        struct timespec left = timespec_of(end_ns - now_ns);
        struct pollfd ready = {.fd = events->fd, .events = POLLIN};
        int result = ppoll(&ready, 1, &left, NULL);
        if (result < 0)
            return errno == EINTR ? 0 : -errno;
        if (result > 0 && !events_wait_to_be_polled(events)) {
            /* A push was polled before its thread got to make_readable. */
            make_unreadable(events);
            if (events_wait_to_be_polled(events))
                make_readable(events);
        }
    }
    return 1;
}

int kvio_eventfd(const kvio *engine) { return engine ? engine->events.fd : -EINVAL; }
