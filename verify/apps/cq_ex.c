/* SPDX-License-Identifier: MIT */
/* An extended CQ on a channel, polled by start_poll and end_poll: nothing to read is fatal there. */
#include "loop.h"

int main(int argc, char **argv)
{
    struct loop loop;
    struct pair pair;
    struct ibv_cq_ex *ex;
    struct ibv_cq *got;
    int received = 0;

    loop_open(&loop, argc, argv);
    struct ibv_cq_init_attr_ex init = {
        .cqe = 64,
        .cq_context = &pair,
        .channel = loop.channel,
        .wc_flags = IBV_WC_EX_WITH_BYTE_LEN,
    };
    ex = ibv_create_cq_ex(loop.context, &init);
    if (!ex) {
        printf("no extended CQs here: %s\n", strerror(errno));
        return 77;
    }
    pair_open(&loop, &pair, ibv_cq_ex_to_cq(ex));
    for (int i = 0; i < 100; i++) {
        struct ibv_poll_cq_attr attr = {0};

        loop_arm(ibv_cq_ex_to_cq(ex), 0);
        pair_send(&loop, &pair, 1, 0);
        must(!loop_get(loop.channel, &got));
        must(got == ibv_cq_ex_to_cq(ex));
        must(!ibv_start_poll(ex, &attr));
        must(ex->status == IBV_WC_SUCCESS);
        must(ibv_wc_read_byte_len(ex) == 8);
        received++;
        must(ibv_next_poll(ex) == ENOENT);
        ibv_end_poll(ex);
    }
    printf("received %d\n", received);
    loop_say_event(&loop, "then");
    pair_close(&pair);
    must(!ibv_destroy_cq(ibv_cq_ex_to_cq(ex)));
    loop_close(&loop);
    return 0;
}
