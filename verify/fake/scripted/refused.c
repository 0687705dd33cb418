/* SPDX-License-Identifier: MIT */
/* A provider that knows no solicited-only arm says so, and the application hears it. */
#include "script.h"

int main(int argc, char **argv)
{
    struct ibv_context *context = script_open(argc, argv);
    struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
    struct ibv_cq *cq;
    pthread_t thread;

    must(channel);
    must(cq = ibv_create_cq(context, 4, NULL, channel, 0));
    fake_refuse_solicited(EOPNOTSUPP);
    printf("solicited: %s\n", strerror(ibv_req_notify_cq(cq, 1)));
    fake_refuse_solicited(-EOPNOTSUPP);
    printf("solicited, negative: %s\n", strerror(-ibv_req_notify_cq(cq, 1)));
    printf("next: rc %d\n", ibv_req_notify_cq(cq, 0));
    struct script_later later = {cq, 1, 5000, 0, IBV_WC_SUCCESS};
    thread = script_later(&later);
    printf("wait: %s\n", script_said(script_get(channel, NULL)));
    must(!pthread_join(thread, NULL));
    must(!ibv_destroy_cq(cq));
    must(!ibv_destroy_comp_channel(channel));
    must(!ibv_close_device(context));
    return 0;
}
