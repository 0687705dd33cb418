/* SPDX-License-Identifier: MIT */
/*
 * Threads that poll and arm while another one waits: the waiter's look must leave their completions
 * to them, and must not stand in their way.
 */
#include <sched.h>

#include "script.h"

enum { COMPLETIONS = 4000 };

static struct ibv_comp_channel *channel;
static struct ibv_cq *cq;
static int received;

static void *polls(void *arg)
{
    struct ibv_wc wc;

    (void)arg;
    while (__atomic_load_n(&received, __ATOMIC_SEQ_CST) < COMPLETIONS) {
        if (ibv_poll_cq(cq, 1, &wc) == 1)
            __atomic_add_fetch(&received, 1, __ATOMIC_SEQ_CST);
        else
            sched_yield();
        must(!ibv_req_notify_cq(cq, 0));
    }
    return NULL;
}

static void *completes(void *arg)
{
    (void)arg;
    for (int i = 0; i < COMPLETIONS; i++)
        while (fake_complete(cq, 1, 0, IBV_WC_SUCCESS))
            sched_yield();
    return NULL;
}

int main(int argc, char **argv)
{
    struct ibv_context *context = script_open(argc, argv);
    pthread_t poller, completer;

    must(channel = ibv_create_comp_channel(context));
    must(cq = ibv_create_cq(context, 4, NULL, channel, 0));
    must(!ibv_req_notify_cq(cq, 0));
    must(!pthread_create(&poller, NULL, polls, NULL));
    must(!pthread_create(&completer, NULL, completes, NULL));
    while (__atomic_load_n(&received, __ATOMIC_SEQ_CST) < COMPLETIONS / 2)
        must(!script_get(channel, NULL));
    must(!pthread_join(completer, NULL));
    must(!pthread_join(poller, NULL));
    printf("every completion was received once\n");

    /* What arms and events are left over is settled by one more round. */
    must(!ibv_req_notify_cq(cq, 0));
    must(!fake_complete(cq, 1, 0, IBV_WC_SUCCESS));
    must(!script_get(channel, NULL));
    while (!script_try_get(channel))
        ;
    must(!ibv_destroy_cq(cq));
    must(!ibv_destroy_comp_channel(channel));
    must(!ibv_close_device(context));
    return 0;
}
