/* SPDX-License-Identifier: MIT */
/* pthread_cancel of a thread that waits: the wait is a cancellation point, deferred or not. */
#include "loop.h"

static struct loop loop;
static int type, waiting;

static void cleaned(void *arg)
{
    printf("%s", (const char *)arg);
}

static void *waits(void *arg)
{
    (void)arg;
    must(!pthread_setcanceltype(type, NULL));
    pthread_cleanup_push(cleaned, "the cleanup handler ran, ");
    __atomic_store_n(&waiting, 1, __ATOMIC_SEQ_CST);
    loop_get(loop.channel, NULL);
    pthread_cleanup_pop(0);
    return NULL;
}

static void cancel_after(int pause)
{
    pthread_t thread;
    void *result;

    __atomic_store_n(&waiting, 0, __ATOMIC_SEQ_CST);
    must(!pthread_create(&thread, NULL, waits, NULL));
    while (!__atomic_load_n(&waiting, __ATOMIC_SEQ_CST))
        loop_pause(1);
    loop_pause(pause);
    must(!pthread_cancel(thread));
    must(!pthread_join(thread, &result));
    printf("%s\n", result == PTHREAD_CANCELED ? "cancelled" : "returned");
}

int main(int argc, char **argv)
{
    loop_open(&loop, argc, argv);
    for (type = PTHREAD_CANCEL_DEFERRED;; type = PTHREAD_CANCEL_ASYNCHRONOUS) {
        printf("%s\n", type == PTHREAD_CANCEL_DEFERRED ? "deferred" : "asynchronous");
        for (int pause = 5; pause <= 40; pause *= 2) {
            loop_arm(loop.cq, 0);
            cancel_after(pause);
        }
        /* Nothing is broken, no lock is held: the next waiter gets its event. */
        pthread_t thread = loop_send_later(&loop, 1, 10);
        printf("afterwards: %s\n", loop_error(loop_get(loop.channel, NULL)));
        loop_join(thread);
        loop_drain(&loop, 1);
        loop_arm(loop.cq, 0);
        loop_send(&loop, 1);
        printf("already there: %s\n", loop_error(loop_get(loop.channel, NULL)));
        loop_drain(&loop, 1);
        if (type == PTHREAD_CANCEL_ASYNCHRONOUS)
            break;
    }
    loop_close(&loop);
    return 0;
}
