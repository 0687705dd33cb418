/* SPDX-License-Identifier: MIT */
/* The device goes while a thread waits: EIO, now and whenever it asks again. */
#include "script.h"

static void *unplugs(void *channel)
{
    script_pause(30000);
    fake_unplug(channel);
    return NULL;
}

int main(int argc, char **argv)
{
    struct ibv_context *context = script_open(argc, argv);
    struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
    struct ibv_cq *cq;
    struct ibv_wc wc;
    pthread_t thread;

    must(channel);
    must(cq = ibv_create_cq(context, 4, NULL, channel, 0));
    must(!ibv_req_notify_cq(cq, 0));
    struct script_later later = {cq, 1, 5000, 0, IBV_WC_SUCCESS};
    thread = script_later(&later);
    must(!script_get(channel, NULL));
    must(!pthread_join(thread, NULL));
    must(ibv_poll_cq(cq, 1, &wc) == 1);
    must(!ibv_req_notify_cq(cq, 0));
    must(!fake_complete(cq, 1, 0, IBV_WC_SUCCESS));
    must(!script_get(channel, NULL));
    must(ibv_poll_cq(cq, 1, &wc) == 1);

    must(!ibv_req_notify_cq(cq, 0));
    must(!pthread_create(&thread, NULL, unplugs, channel));
    printf("during the wait: %s\n", script_said(script_get(channel, NULL)));
    must(!pthread_join(thread, NULL));
    printf("afterwards: %s\n", script_said(script_get(channel, NULL)));
    return 0;
}
