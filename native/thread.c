/* SPDX-License-Identifier: Apache-2.0 */
#include "internal.h"
#include <errno.h>
#include <numa.h>
#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

uint64_t clock_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

struct timespec timespec_of(uint64_t nanoseconds) {
    return (struct timespec){.tv_sec = (time_t)(nanoseconds / 1000000000u),
                             .tv_nsec = (long)(nanoseconds % 1000000000u)};
}

struct start {
    void *(*run)(void *);
    void *argument;
    const char *name;
    pthread_mutex_t lock;
    pthread_cond_t begun;
    bool taken;
};

static void *begin(void *argument) {
    struct start *start = argument;
    void *(*run)(void *) = start->run;
    void *run_argument = start->argument;
    prctl(PR_SET_NAME, start->name);
    prctl(PR_SET_TIMERSLACK, 1ul);
    pthread_mutex_lock(&start->lock);
    start->taken = true;
    pthread_cond_signal(&start->begun);
    pthread_mutex_unlock(&start->lock);
    return run(run_argument);
}

/* Signals stay with the host's threads. */
int thread_start(pthread_t *thread, const char *name, void *(*run)(void *), void *argument) {
    struct start start = {.run = run, .argument = argument, .name = name};
    pthread_mutex_init(&start.lock, NULL);
    pthread_cond_init(&start.begun, NULL);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(thread, NULL, begin, &start);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_mutex_lock(&start.lock);
    while (!error && !start.taken)
        pthread_cond_wait(&start.begun, &start.lock);
    pthread_mutex_unlock(&start.lock);
    pthread_cond_destroy(&start.begun);
    pthread_mutex_destroy(&start.lock);
    return -error;
}

bool numa_node_exists(int32_t numa_node) {
    char path[64];
    snprintf(path, sizeof path, "/sys/devices/system/node/node%d", numa_node);
    return numa_node >= 0 && access(path, F_OK) == 0;
}

/* Within the processors that the process may use. */
void thread_bind(int32_t numa_node) {
    cpu_set_t allowed, wanted;
    if (numa_node < 0 || numa_available() < 0 ||
        pthread_getaffinity_np(pthread_self(), sizeof allowed, &allowed) != 0)
        return;
    struct bitmask *processors = numa_allocate_cpumask();
    CPU_ZERO(&wanted);
    if (processors && numa_node_to_cpus(numa_node, processors) == 0)
        for (unsigned i = 0; i < CPU_SETSIZE && i < processors->size; i++)
            if (numa_bitmask_isbitset(processors, i) && CPU_ISSET(i, &allowed))
                CPU_SET(i, &wanted);
    if (processors)
        numa_free_cpumask(processors);
    if (CPU_COUNT(&wanted) > 0)
        (void)pthread_setaffinity_np(pthread_self(), sizeof wanted, &wanted);
}

int condition_create(pthread_cond_t *condition) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    int error = pthread_cond_init(condition, &attributes);
    pthread_condattr_destroy(&attributes);
    return -error;
}
