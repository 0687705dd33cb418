/* SPDX-License-Identifier: MIT */
/* A thread waits for events and posts a semaphore to a worker, both on one core, as rping does. */
#define _GNU_SOURCE
#include "loop.h"

#include <sched.h>
#include <semaphore.h>

enum { ROUNDS = 300 };

static struct loop loop;
static sem_t received;

static void *cq_thread(void *arg)
{
    int seen = 0;

    (void)arg;
    while (seen < ROUNDS) {
        must(!loop_get(loop.channel, NULL));
        loop_arm(loop.cq, 0);
        while (loop_poll(&loop, &loop.pair)) {
            seen++;
            must(!sem_post(&received));
        }
    }
    return NULL;
}

int main(int argc, char **argv)
{
    pthread_t thread;
    cpu_set_t own, one;

    must(!sched_getaffinity(0, sizeof own, &own));
    CPU_ZERO(&one);
    for (int cpu = CPU_SETSIZE - 1; cpu >= 0; cpu--)
        if (CPU_ISSET(cpu, &own)) {
            CPU_SET(cpu, &one);
            break;
        }
    must(!sched_setaffinity(0, sizeof one, &one));
    loop_open(&loop, argc, argv);
    must(!sem_init(&received, 0, 0));
    loop_arm(loop.cq, 0);
    must(!pthread_create(&thread, NULL, cq_thread, NULL));
    for (int i = 0; i < ROUNDS; i++) {
        loop_send(&loop, 1);
        while (sem_wait(&received))
            must(errno == EINTR);
    }
    loop_join(thread);
    printf("every message reached the worker\n");
    loop_close(&loop);
    return 0;
}
