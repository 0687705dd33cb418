/* SPDX-License-Identifier: MIT */
/* cq->cq_context is the application's to change: an event hands out what it is at that moment. */
#include "loop.h"

int main(int argc, char **argv)
{
    struct loop loop;
    struct ibv_cq *cq;
    void *context;
    int values[3];

    loop_open(&loop, argc, argv);
    for (int i = 0; i < 3; i++) {
        loop_arm(loop.cq, 0);
        loop_send(&loop, 1);
        loop.cq->cq_context = &values[i];
        must(!ibv_get_cq_event(loop.channel, &cq, &context));
        ibv_ack_cq_events(cq, 1);
        printf("the context is %s\n", context == &values[i] ? "the new one" : "another one");
        loop_drain(&loop, 1);
    }
    loop_close(&loop);
    return 0;
}
