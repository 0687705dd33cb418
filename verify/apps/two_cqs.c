/* SPDX-License-Identifier: MIT */
/* Two CQs on one channel: each event names its own, and neither is lost. */
#include "loop.h"

int main(int argc, char **argv)
{
    struct loop loop;
    struct pair second;
    struct ibv_cq *cq, *got;
    int first_events = 0, second_events = 0;

    loop_open(&loop, argc, argv);
    must(cq = ibv_create_cq(loop.context, 512, &second, loop.channel, 0));
    pair_open(&loop, &second, cq);
    for (int round = 0; round < 100; round++) {
        loop_arm(loop.cq, 0);
        loop_arm(cq, 0);
        pair_send(&loop, &loop.pair, 1, 0);
        pair_send(&loop, &second, 1, 0);
        for (int i = 0; i < 2; i++) {
            must(!loop_get(loop.channel, &got));
            if (got == loop.cq)
                first_events++;
            else if (got == cq)
                second_events++;
        }
        while (!loop_poll(&loop, &loop.pair) || !loop_poll(&loop, &second))
            must(!"a completion is missing");
    }
    printf("first CQ: %d events, second CQ: %d events\n", first_events, second_events);

    /* Only one of them has work; the other's arm stays and is answered later. */
    loop_arm(loop.cq, 0);
    loop_arm(cq, 0);
    pthread_t thread = loop_send_later(&loop, 1, 20);
    must(!loop_get(loop.channel, &got));
    printf("woken by the %s\n", got == loop.cq ? "first" : "second");
    loop_join(thread);
    loop_drain(&loop, 1);
    loop_say_event(&loop, "then");
    pair_send(&loop, &second, 1, 0);
    must(!loop_get(loop.channel, &got));
    printf("woken by the %s\n", got == loop.cq ? "first" : "second");

    pair_close(&second);
    must(!ibv_destroy_cq(cq));
    loop_close(&loop);
    return 0;
}
