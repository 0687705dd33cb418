/* SPDX-License-Identifier: MIT */
/* A signal handler leaves the wait by siglongjmp: the wait is over, and the next one works. */
#include "loop.h"

#include <setjmp.h>
#include <signal.h>

static sigjmp_buf out;
static pthread_t waiter;
static int waiting;

static void on_signal(int number)
{
    (void)number;
    siglongjmp(out, 1);
}

static void *interrupts(void *pause)
{
    while (!__atomic_load_n(&waiting, __ATOMIC_SEQ_CST))
        loop_pause(1);
    loop_pause((long)pause);
    must(!pthread_kill(waiter, SIGUSR1));
    return NULL;
}

int main(int argc, char **argv)
{
    struct loop loop;
    struct sigaction action = {.sa_handler = on_signal};
    static volatile long pause;
    static volatile int left;
    pthread_t thread;

    waiter = pthread_self();
    loop_open(&loop, argc, argv);
    must(!sigaction(SIGUSR1, &action, NULL));
    for (pause = 5; pause <= 40; pause *= 2) {
        loop_arm(loop.cq, 0);
        __atomic_store_n(&waiting, 0, __ATOMIC_SEQ_CST);
        must(!pthread_create(&thread, NULL, interrupts, (void *)pause));
        if (!sigsetjmp(out, 1)) {
            __atomic_store_n(&waiting, 1, __ATOMIC_SEQ_CST);
            loop_get(loop.channel, NULL);
            printf("the wait ended by itself\n");
        } else {
            left++;
        }
        loop_join(thread);
        /* The arm still stands. */
        thread = loop_send_later(&loop, 1, pause);
        printf("the next wait: %s\n", loop_error(loop_get(loop.channel, NULL)));
        loop_join(thread);
        loop_drain(&loop, 1);
        loop_arm(loop.cq, 0);
        loop_send(&loop, 1);
        printf("and another: %s\n", loop_error(loop_get(loop.channel, NULL)));
        loop_drain(&loop, 1);
    }
    printf("left %d times\n", left);
    loop_close(&loop);
    return 0;
}
