/* SPDX-License-Identifier: MIT */
/* ibv_resize_cq while armed: the arm survives, and so do the completions in the ring. */
#include "loop.h"

int main(int argc, char **argv)
{
    static const int sizes[] = {600, 1200, 300};
    struct loop loop;
    pthread_t thread;

    loop_open(&loop, argc, argv);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        loop_arm(loop.cq, 0);
        int rc = ibv_resize_cq(loop.cq, sizes[i]);
        printf("resize: %s, %s\n", loop_error(rc),
               loop.cq->cqe >= sizes[i] ? "as large as asked" : "smaller");
        thread = loop_send_later(&loop, 2, i * 10);
        printf("armed before: %s\n", loop_error(loop_get(loop.channel, NULL)));
        loop_join(thread);
        rc = ibv_resize_cq(loop.cq, sizes[i] + 100);
        printf("with completions inside: %s\n", loop_error(rc));
        loop_drain(&loop, 2);
        loop_say_event(&loop, "drained");
    }
    loop_close(&loop);
    return 0;
}
