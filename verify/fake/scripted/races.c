/* SPDX-License-Identifier: MIT */
/*
 * A completion at every point of the provider that a waiter can pass, the first time or a later one:
 * the two event loops that programs use must receive it, whatever the point.
 *
 * Each round a hook completes once at its point, and a second thread completes once more a little
 * later. If the point is not passed in this round (under the shim an arm may never reach the
 * provider), the second thread does both.
 */
#include "script.h"

enum { HIGHEST_NTH = 6, PER_ROUND = 2 };

static const char *const points[FAKE_POINTS] = {
    "before the arm", "after the arm",  "before the poll",
    "after the poll", "before the read", "after the read",
};

static struct ibv_comp_channel *channel;
static struct ibv_cq *cq;
static int hooked; /* the hook of this round has run */

static void complete_once(struct ibv_cq *passed, void *arg)
{
    (void)passed, (void)arg;
    __atomic_store_n(&hooked, 1, __ATOMIC_SEQ_CST);
    must(!fake_complete(cq, 1, 0, IBV_WC_SUCCESS));
}

static void *complete_the_rest(void *point)
{
    script_pause(2000);
    fake_at((enum fake_point)(long)point, 1, NULL, NULL);
    if (!__atomic_exchange_n(&hooked, 1, __ATOMIC_SEQ_CST)) {
        must(!fake_complete(cq, 1, 0, IBV_WC_SUCCESS));
        script_pause(500);
    }
    must(!fake_complete(cq, 1, 0, IBV_WC_SUCCESS));
    return NULL;
}

static int poll_all(void)
{
    struct ibv_wc wc;
    int received = 0;

    while (ibv_poll_cq(cq, 1, &wc) == 1) {
        must(wc.status == IBV_WC_SUCCESS);
        received++;
    }
    return received;
}

/* Poll; arm; poll again; wait only if nothing was there. */
static void careful_loop(int wanted)
{
    int received = poll_all();

    while (received < wanted) {
        must(!ibv_req_notify_cq(cq, 0));
        int more = poll_all();

        received += more;
        if (!more && received < wanted)
            must(!script_get(channel, NULL));
    }
    must(received == wanted);
}

/* Wait for the event of the standing arm; arm again; poll until empty. */
static void event_loop(int wanted)
{
    int received = poll_all();

    while (received < wanted) {
        must(!script_get(channel, NULL));
        must(!ibv_req_notify_cq(cq, 0));
        received += poll_all();
    }
    must(received == wanted);
}

static void rounds(void (*loop)(int), int cqe)
{
    must(cq = ibv_create_cq(channel->context, cqe, NULL, channel, 0));
    must(!ibv_req_notify_cq(cq, 0));
    for (long point = 0; point < FAKE_POINTS; point++) {
        for (unsigned nth = 1; nth <= HIGHEST_NTH; nth++) {
            pthread_t thread;

            __atomic_store_n(&hooked, 0, __ATOMIC_SEQ_CST);
            fake_at(point, nth, complete_once, NULL);
            must(!pthread_create(&thread, NULL, complete_the_rest, (void *)point));
            loop(PER_ROUND);
            must(!pthread_join(thread, NULL));
            must(!poll_all());
        }
        printf("ring of %d, %s: all received\n", cqe, points[point]);
    }
    must(!ibv_destroy_cq(cq));
}

int main(int argc, char **argv)
{
    struct ibv_context *context = script_open(argc, argv);

    must(channel = ibv_create_comp_channel(context));
    for (int cqe = 2; cqe <= 4; cqe *= 2) {
        printf("careful loop\n");
        rounds(careful_loop, cqe);
        printf("event loop\n");
        rounds(event_loop, cqe);
    }
    must(!ibv_destroy_comp_channel(channel));
    must(!ibv_close_device(context));
    return 0;
}
