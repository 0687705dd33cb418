/* SPDX-License-Identifier: MIT */
/* Both ends wait for events, each in its own thread on its own channel. */
#include "loop.h"

enum { ROUNDS = 1000 };

struct side {
    struct loop *loop;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq;
    struct pair *in;  /* receives here */
    struct pair *out; /* and sends there */
    int serves;
};

static void *bounce(void *arg)
{
    struct side *side = arg;
    int received = 0;

    if (side->serves)
        pair_send(side->loop, side->out, 1, 0);
    while (received < ROUNDS) {
        must(!loop_get(side->channel, NULL));
        loop_arm(side->cq, 0);
        while (loop_poll(side->loop, side->in)) {
            received++;
            if (received < ROUNDS || !side->serves)
                pair_send(side->loop, side->out, 1, 0);
        }
    }
    return NULL;
}

int main(int argc, char **argv)
{
    struct loop loop;
    struct pair back;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq;
    pthread_t thread;

    loop_open(&loop, argc, argv);
    must(channel = ibv_create_comp_channel(loop.context));
    must(cq = ibv_create_cq(loop.context, 512, NULL, channel, 0));
    pair_open(&loop, &back, cq);
    loop_arm(loop.cq, 0);
    loop_arm(cq, 0);

    struct side here = {&loop, loop.channel, loop.cq, &loop.pair, &back, 1};
    struct side there = {&loop, channel, cq, &back, &loop.pair, 0};
    must(!pthread_create(&thread, NULL, bounce, &there));
    bounce(&here);
    loop_join(thread);
    printf("both sides received all\n");
    pair_close(&back);
    must(!ibv_destroy_cq(cq));
    must(!ibv_destroy_comp_channel(channel));
    loop_close(&loop);
    return 0;
}
