/* SPDX-License-Identifier: MIT */
/*
 * No queue pair can be made, so no completion can be made up to force an event: a channel must then
 * be left to the kernel, or a waiter that nobody sees would be stranded.
 */
#include <poll.h>
#include <sys/syscall.h>

#include "script.h"

int main(int argc, char **argv)
{
    struct ibv_context *context = script_open(argc, argv);
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq;
    struct ibv_wc wc;
    struct pollfd pollfd;
    pthread_t thread;

    fake_fail_create_qp(ENOMEM);
    must(channel = ibv_create_comp_channel(context));
    must(cq = ibv_create_cq(context, 4, NULL, channel, 0));
    pollfd = (struct pollfd){.fd = channel->fd, .events = POLLIN};
    for (int i = 0; i < 20; i++) {
        must(!ibv_req_notify_cq(cq, 0));
        struct script_later later = {cq, 1, 1000, 0, IBV_WC_SUCCESS};
        thread = script_later(&later);
        must(!script_get(channel, NULL));
        must(!pthread_join(thread, NULL));
        must(ibv_poll_cq(cq, 1, &wc) == 1);

        must(!ibv_req_notify_cq(cq, 0));
        must(!fake_complete(cq, 1, 0, IBV_WC_SUCCESS));
        must(syscall(SYS_poll, &pollfd, 1, 5000) == 1);
        must(!script_get(channel, NULL));
        must(ibv_poll_cq(cq, 1, &wc) == 1);
    }
    printf("all events came\n");
    must(!ibv_destroy_cq(cq));
    must(!ibv_destroy_comp_channel(channel));
    must(!ibv_close_device(context));
    return 0;
}
