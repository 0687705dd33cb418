/* SPDX-License-Identifier: MIT */
/* Acknowledgements that come late, in batches and from another thread, as servers do it. */
#include "loop.h"

enum { EVENTS = 200 };

static struct loop loop;
static int owed; /* events taken and not acknowledged yet */

static void *acknowledges(void *arg)
{
    int left = EVENTS;

    (void)arg;
    while (left) {
        int n = __atomic_exchange_n(&owed, 0, __ATOMIC_SEQ_CST);

        if (n)
            ibv_ack_cq_events(loop.cq, n);
        left -= n;
        loop_pause(1);
    }
    return NULL;
}

int main(int argc, char **argv)
{
    struct ibv_cq *cq;
    void *context;
    pthread_t thread;

    loop_open(&loop, argc, argv);
    must(!pthread_create(&thread, NULL, acknowledges, NULL));
    for (int i = 0; i < EVENTS; i++) {
        loop_arm(loop.cq, 0);
        loop_send(&loop, 1);
        must(!ibv_get_cq_event(loop.channel, &cq, &context));
        must(cq == loop.cq && context == &loop);
        __atomic_add_fetch(&owed, 1, __ATOMIC_SEQ_CST);
        loop_drain(&loop, 1);
    }
    /* Destroying waits for the rest of them. */
    loop_close(&loop);
    loop_join(thread);
    printf("all acknowledged\n");
    return 0;
}
