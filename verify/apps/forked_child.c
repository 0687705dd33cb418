/* SPDX-License-Identifier: MIT */
/* An invisible waiter: a forked child reads the event of the parent's channel. */
#include "loop.h"

#include <sys/wait.h>

static void child_reads(struct loop *loop, int armed_before, int pause)
{
    int status;
    pid_t child;

    if (armed_before)
        loop_arm(loop->cq, 0);
    fflush(stdout);
    must((child = fork()) >= 0);
    if (!child) {
        uint64_t record;

        /* The child has no business with the CQ; it only learns that something came. */
        _exit(read(loop->channel->fd, &record, sizeof record) == sizeof record ? 0 : 1);
    }
    if (!armed_before)
        loop_arm(loop->cq, 0);
    pthread_t thread = loop_send_later(loop, 1, pause);
    must(waitpid(child, &status, 0) == child);
    printf("armed %s the fork: the child read %s\n", armed_before ? "before" : "after",
           status ? "nothing" : "a record");
    loop_join(thread);
    loop_drain(loop, 1);
    loop_say_event(loop, "left for the parent");
    ibv_ack_cq_events(loop->cq, 1);
}

int main(int argc, char **argv)
{
    struct loop loop;

    loop_open(&loop, argc, argv);
    loop_first_waits(&loop);
    for (int pause = 0; pause <= 20; pause += 20) {
        child_reads(&loop, 1, pause);
        child_reads(&loop, 0, pause);
    }
    loop_arm(loop.cq, 0);
    loop_send(&loop, 1);
    printf("the parent: %s\n", loop_error(loop_get(loop.channel, NULL)));
    loop_drain(&loop, 1);
    loop_close(&loop);
    return 0;
}
