/* SPDX-License-Identifier: MIT */
/* A channel is destroyed while a thread waits on it: the call succeeds and the thread waits on. */
#include "loop.h"

static struct ibv_comp_channel *channel;
static int waiting, returned;

static void *gets(void *arg)
{
    struct ibv_cq *cq;
    void *context;

    (void)arg;
    __atomic_store_n(&waiting, 1, __ATOMIC_SEQ_CST);
    ibv_get_cq_event(channel, &cq, &context);
    __atomic_store_n(&returned, 1, __ATOMIC_SEQ_CST);
    return NULL;
}

int main(int argc, char **argv)
{
    struct loop loop;
    struct pair pair;
    struct ibv_cq *cq;
    pthread_t thread;

    loop_open(&loop, argc, argv);
    must(channel = ibv_create_comp_channel(loop.context));
    must(cq = ibv_create_cq(loop.context, 512, NULL, channel, 0));
    pair_open(&loop, &pair, cq);
    /* First an ordinary wait, after which the channel may be served. */
    loop_arm(cq, 0);
    pair_send(&loop, &pair, 1, 0);
    must(!loop_get(channel, NULL));
    must(loop_poll(&loop, &pair));

    loop_arm(cq, 0);
    must(!pthread_create(&thread, NULL, gets, NULL));
    while (!__atomic_load_n(&waiting, __ATOMIC_SEQ_CST))
        loop_pause(1);
    loop_pause(50);
    pair_close(&pair);
    printf("CQ: %s\n", loop_error(ibv_destroy_cq(cq)));
    printf("channel: %s\n", loop_error(ibv_destroy_comp_channel(channel)));
    loop_pause(100);
    printf("the waiter %s\n", __atomic_load_n(&returned, __ATOMIC_SEQ_CST) ? "returned" : "waits");

    /* The rest of the program goes on. */
    loop_arm(loop.cq, 0);
    loop_send(&loop, 1);
    printf("another channel: %s\n", loop_error(loop_get(loop.channel, NULL)));
    loop_drain(&loop, 1);
    return 0;
}
