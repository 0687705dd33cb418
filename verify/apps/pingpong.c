/* SPDX-License-Identifier: MIT */
/* The plain event loop: get, acknowledge, arm, poll, answer. The peer polls, on a thread of its own. */
#include "loop.h"

enum { ROUNDS = 2000 };

static void *peer(void *arg)
{
    struct loop *loop = arg;

    for (int i = 0; i < ROUNDS; i++) {
        loop_send(loop, 1);
        pair_await_answer(loop, &loop->pair);
        /* Now and then a pause that outlasts any spinning, so that the waiter sleeps as well. */
        if (i % 200 == 0)
            loop_pause(3);
    }
    return NULL;
}

int main(int argc, char **argv)
{
    struct loop loop;
    struct ibv_cq *cq;
    pthread_t thread;
    int events = 0, received = 0;

    loop_open(&loop, argc, argv);
    loop_arm(loop.cq, 0);
    must(!pthread_create(&thread, NULL, peer, &loop));
    while (received < ROUNDS) {
        must(!loop_get(loop.channel, &cq));
        must(cq == loop.cq);
        events++;
        loop_arm(cq, 0);
        while (loop_poll(&loop, &loop.pair)) {
            received++;
            pair_answer(&loop, &loop.pair);
        }
    }
    loop_join(thread);
    printf("all received, %s\n", events <= ROUNDS ? "no more events than completions" : "extra");
    loop_close(&loop);
    return 0;
}
