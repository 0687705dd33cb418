/* SPDX-License-Identifier: MIT */
/* The record behind an event, read without ibv_get_cq_event: by read(2), and by a bare system call. */
#include "loop.h"

#include <sys/syscall.h>

int main(int argc, char **argv)
{
    struct loop loop;
    pthread_t thread;
    uint64_t record;
    long got;

    loop_open(&loop, argc, argv);
    loop_first_waits(&loop);
    for (int pause = 0; pause <= 20; pause += 10)
        for (int bare = 0; bare < 2; bare++) {
            loop_arm(loop.cq, 0);
            thread = loop_send_later(&loop, 1, pause);
            got = bare ? syscall(SYS_read, loop.channel->fd, &record, sizeof record)
                       : read(loop.channel->fd, &record, sizeof record);
            printf("%s: %ld bytes\n", bare ? "bare" : "read", got);
            loop_join(thread);
            loop_drain(&loop, 1);
            ibv_ack_cq_events(loop.cq, 1);
        }
    /* Writing is not for us. */
    printf("write: %s\n",
           write(loop.channel->fd, &record, sizeof record) < 0 ? loop_error(errno) : "ok");
    loop_close(&loop);
    return 0;
}
