/* SPDX-License-Identifier: MIT */
/* Destroying: EBUSY while something hangs on it, and waiting for acknowledgements that are missing. */
#include "loop.h"

static struct loop loop;

struct destruction {
    struct ibv_cq *cq;
    int rc, done;
};

static void *destroys(void *arg)
{
    struct destruction *destruction = arg;

    destruction->rc = ibv_destroy_cq(destruction->cq);
    __atomic_store_n(&destruction->done, 1, __ATOMIC_RELEASE);
    return NULL;
}

/* A CQ that took n events, of which none is acknowledged. */
static struct ibv_cq *cq_with_events(int n)
{
    struct ibv_cq *cq = ibv_create_cq(loop.context, 512, NULL, loop.channel, 0), *got;
    struct pair pair;
    void *context;

    must(cq);
    pair_open(&loop, &pair, cq);
    for (int i = 0; i < n; i++) {
        loop_arm(cq, 0);
        pair_send(&loop, &pair, 1, 0);
        must(!ibv_get_cq_event(loop.channel, &got, &context) && got == cq);
        must(loop_poll(&loop, &pair));
    }
    pair_close(&pair);
    return cq;
}

/* Acknowledgements come in `steps`, from this thread, while another one destroys. */
static void destroy_with(const char *what, int events, const int *steps)
{
    struct destruction destruction = {.cq = cq_with_events(events)};
    pthread_t thread;

    must(!pthread_create(&thread, NULL, destroys, &destruction));
    for (; *steps; steps++) {
        loop_pause(30);
        printf("%s: %s\n", what,
               __atomic_load_n(&destruction.done, __ATOMIC_ACQUIRE) ? "gone" : "waiting");
        ibv_ack_cq_events(destruction.cq, *steps);
    }
    loop_join(thread);
    printf("%s: rc %d\n", what, destruction.rc);
}

int main(int argc, char **argv)
{
    struct ibv_cq *cq;
    pthread_t thread;

    loop_open(&loop, argc, argv);

    loop_first_waits(&loop);

    errno = 0;
    printf("channel with a CQ: %s", loop_error(ibv_destroy_comp_channel(loop.channel)));
    printf(", errno %s\n", errno ? "set" : "untouched");
    printf("CQ with a QP: %s\n", loop_error(ibv_destroy_cq(loop.cq)));
    loop_arm(loop.cq, 0);
    loop_send(&loop, 1);
    printf("and it goes on: %s\n", loop_error(loop_get(loop.channel, NULL)));
    loop_drain(&loop, 1);

    destroy_with("no event", 0, (const int[]){0});
    destroy_with("late, all at once", 3, (const int[]){3, 0});
    destroy_with("late, one by one", 3, (const int[]){1, 1, 1, 0});

    cq = cq_with_events(2);
    ibv_ack_cq_events(cq, 2);
    printf("acknowledged before: rc %d\n", ibv_destroy_cq(cq));

    /* An event that nobody reads is dropped with its CQ and need not be acknowledged. */
    struct pair pair;
    must(cq = ibv_create_cq(loop.context, 512, NULL, loop.channel, 0));
    pair_open(&loop, &pair, cq);
    loop_arm(cq, 0);
    pair_send(&loop, &pair, 1, 0);
    loop_pause(20);
    pair_close(&pair);
    printf("unread event: rc %d\n", ibv_destroy_cq(cq));
    loop_say_event(&loop, "after it");

    /* More acknowledgements than events: the counts never meet, and the destroyer waits for ever. */
    struct destruction stuck = {.cq = cq_with_events(1)};
    ibv_ack_cq_events(stuck.cq, 3);
    must(!pthread_create(&thread, NULL, destroys, &stuck));
    loop_pause(100);
    printf("too many: %s\n", __atomic_load_n(&stuck.done, __ATOMIC_ACQUIRE) ? "gone" : "waiting");
    return 0;
}
