/* SPDX-License-Identifier: MIT */
/* Solicited-only arms: an ordinary message is not for them, a solicited or failed one is. */
#include "loop.h"

int main(int argc, char **argv)
{
    struct loop loop;
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};
    struct ibv_wc wc;
    int flushed = 0;

    loop_open(&loop, argc, argv);
    loop_arm(loop.cq, 1);
    loop_send(&loop, 1);
    loop_say_event(&loop, "ordinary");
    pair_send(&loop, &loop.pair, 1, IBV_SEND_SOLICITED);
    printf("solicited: %s\n", loop_error(loop_get(loop.channel, NULL)));
    loop_drain(&loop, 2);

    loop_arm(loop.cq, 1);
    loop_arm(loop.cq, 0);
    pthread_t thread = loop_send_later(&loop, 1, 10);
    printf("solicited, then next: %s\n", loop_error(loop_get(loop.channel, NULL)));
    loop_join(thread);
    loop_drain(&loop, 1);

    loop_arm(loop.cq, 1);
    must(!ibv_modify_qp(loop.pair.near, &attr, IBV_QP_STATE));
    printf("flushed: %s\n", loop_error(loop_get(loop.channel, NULL)));
    while (ibv_poll_cq(loop.cq, 1, &wc) == 1)
        flushed += wc.status == IBV_WC_WR_FLUSH_ERR;
    printf("flush completions: %s\n", flushed ? "some" : "none");
    loop_close(&loop);
    return 0;
}
