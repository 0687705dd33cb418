/* SPDX-License-Identifier: MIT */
/*
 * A completion that is present when the CQ is armed makes no event; the next one does. Programs know
 * it and poll once more between arming and waiting.
 */
#include "loop.h"

int main(int argc, char **argv)
{
    struct loop loop;

    loop_open(&loop, argc, argv);
    for (int i = 0; i < 3; i++) {
        loop_send(&loop, 1);
        loop_arm(loop.cq, 0);
        loop_say_event(&loop, "one was there before the arm");
        loop_pause(i * 10);
        loop_say_event(&loop, "later");
        pthread_t thread = loop_send_later(&loop, 1, i * 10);
        printf("with the next one: %s\n", loop_error(loop_get(loop.channel, NULL)));
        loop_join(thread);
        loop_drain(&loop, 2);
        loop_say_event(&loop, "drained");
    }
    loop_close(&loop);
    return 0;
}
