/* SPDX-License-Identifier: MIT */
/* One event per arm, and only for what is newer than the arm, in rings so small that they wrap. */
#include "script.h"

static struct ibv_comp_channel *channel;
static struct ibv_cq *cq;

static void drain(unsigned n)
{
    struct ibv_wc wc;
    static uint64_t last;

    while (n--) {
        must(ibv_poll_cq(cq, 1, &wc) == 1);
        must(wc.wr_id == last + 1);
        last = wc.wr_id;
    }
    must(ibv_poll_cq(cq, 1, &wc) == 0);
}

static int say(const char *what)
{
    return printf("%s: %s\n", what, script_said(script_try_get(channel)));
}

int main(int argc, char **argv)
{
    struct ibv_context *context = script_open(argc, argv);
    pthread_t thread;
    struct script_later later;

    must(channel = ibv_create_comp_channel(context));
    must(cq = ibv_create_cq(context, 2, NULL, channel, 0));

    /* A real wait first, after which the channel may be served. */
    must(!ibv_req_notify_cq(cq, 0));
    later = (struct script_later){cq, 1, 5000, 0, IBV_WC_SUCCESS};
    thread = script_later(&later);
    must(!script_get(channel, NULL));
    must(!pthread_join(thread, NULL));
    drain(1);

    say("not armed, nothing");
    must(!fake_complete(cq, 1, 0, IBV_WC_SUCCESS));
    say("not armed, a completion");
    drain(1);

    /* As many completions as the ring holds come and go between the arm and the look. */
    for (int turns = 1; turns <= 4; turns++) {
        must(!ibv_req_notify_cq(cq, 0));
        for (int i = 0; i < turns; i++) {
            must(!fake_complete(cq, 1, 0, IBV_WC_SUCCESS));
            drain(1);
        }
        printf("drained %d: ", turns);
        say("once");
        say("twice");
    }
    for (int turns = 1; turns <= 3; turns++) {
        must(!ibv_req_notify_cq(cq, 0));
        must(!fake_complete(cq, 2, 0, IBV_WC_SUCCESS));
        drain(2);
        must(!fake_complete(cq, 2, 0, IBV_WC_SUCCESS));
        say("the ring went round and is full again");
        say("again");
        drain(2);
    }

    must(!fake_complete(cq, 2, 0, IBV_WC_SUCCESS));
    printf("one too many: %s\n",
           fake_complete(cq, 1, 0, IBV_WC_SUCCESS) ? "the ring is full" : "taken");
    drain(2);

    /* Solicited. */
    must(!ibv_req_notify_cq(cq, 1));
    must(!fake_complete(cq, 1, 0, IBV_WC_SUCCESS));
    say("ordinary for a solicited arm");
    must(!fake_complete(cq, 1, 1, IBV_WC_SUCCESS));
    later.cq = cq;
    printf("solicited for it: %s\n", script_said(script_get(channel, NULL)));
    drain(2);
    must(!ibv_req_notify_cq(cq, 1));
    must(!fake_complete(cq, 1, 0, IBV_WC_RETRY_EXC_ERR));
    printf("failed for it: %s\n", script_said(script_get(channel, NULL)));
    drain(1);

    must(!ibv_destroy_cq(cq));
    must(!ibv_destroy_comp_channel(channel));
    must(!ibv_close_device(context));
    return 0;
}
