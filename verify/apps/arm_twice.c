/* SPDX-License-Identifier: MIT */
/* Two arms before a completion are one: one event, however many completions follow. */
#include "loop.h"

int main(int argc, char **argv)
{
    struct loop loop;

    loop_open(&loop, argc, argv);
    for (int pause = 0; pause <= 20; pause += 10) {
        loop_arm(loop.cq, 0);
        loop_arm(loop.cq, 0);
        pthread_t thread = loop_send_later(&loop, 3, pause);
        printf("get: %s\n", loop_error(loop_get(loop.channel, NULL)));
        loop_join(thread);
        loop_drain(&loop, 3);
        loop_say_event(&loop, "after three completions");
    }
    loop_arm(loop.cq, 0);
    loop_arm(loop.cq, 1);
    loop_send(&loop, 1);
    printf("next, then solicited: %s\n", loop_error(loop_get(loop.channel, NULL)));
    loop_drain(&loop, 1);
    loop_close(&loop);
    return 0;
}
