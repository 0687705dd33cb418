/* SPDX-License-Identifier: MIT */
/* A QP is reset with completions unpolled: they go with it, the event that they made stays. */
#include "loop.h"

int main(int argc, char **argv)
{
    struct loop loop;
    struct pair second;
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RESET};
    struct ibv_wc wc;

    loop_open(&loop, argc, argv);
    loop_first_waits(&loop);

    for (int i = 0; i < 3; i++) {
        pair_open(&loop, &second, loop.cq);
        loop_arm(loop.cq, 0);
        pair_send(&loop, &second, 3, 0);
        loop_pause(i * 5);
        must(!ibv_modify_qp(second.near, &attr, IBV_QP_STATE));
        printf("after the reset: %s\n", loop_error(loop_get(loop.channel, NULL)));
        pair_close(&second);
        /* Completions of the other QP are not touched. */
        loop_arm(loop.cq, 0);
        loop_send(&loop, 1);
        printf("the other QP: %s\n", loop_error(loop_get(loop.channel, NULL)));
        int n, own = 0;
        while ((n = ibv_poll_cq(loop.cq, 1, &wc)) == 1)
            own += wc.qp_num == loop.pair.near->qp_num;
        printf("its completion is %s\n", own == 1 ? "there" : "lost");
    }
    loop_close(&loop);
    return 0;
}
