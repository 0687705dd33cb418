/* SPDX-License-Identifier: MIT */
/* A completion that was polled before its event is asked for: the event still comes, once. */
#include "loop.h"

int main(int argc, char **argv)
{
    struct loop loop;

    loop_open(&loop, argc, argv);
    for (int i = 0; i < 200; i++) {
        loop_arm(loop.cq, 0);
        loop_send(&loop, 1);
        loop_drain(&loop, 1);
        must(!loop_get(loop.channel, NULL));
        must(!loop_poll(&loop, &loop.pair));
    }
    loop_say_event(&loop, "after as many events as arms");
    loop_arm(loop.cq, 0);
    loop_send(&loop, 1);
    loop_drain(&loop, 1);
    loop_pause(20);
    printf("long after: %s\n", loop_error(loop_get(loop.channel, NULL)));
    loop_close(&loop);
    return 0;
}
