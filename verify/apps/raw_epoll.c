/* SPDX-License-Identifier: MIT */
/* An invisible waiter: epoll by bare system calls, as runtimes without libc make them. */
#include "loop.h"

#include <sys/epoll.h>
#include <sys/syscall.h>

int main(int argc, char **argv)
{
    struct loop loop;
    struct epoll_event event = {.events = EPOLLIN};
    pthread_t thread;
    int set;

    loop_open(&loop, argc, argv);
    loop_first_waits(&loop);

    must((set = syscall(SYS_epoll_create1, EPOLL_CLOEXEC)) >= 0);
    must(!syscall(SYS_epoll_ctl, set, EPOLL_CTL_ADD, loop.channel->fd, &event));
    for (int pause = 0; pause <= 20; pause += 10) {
        loop_arm(loop.cq, 0);
        loop_send(&loop, 1); /* at once: between the arm and anybody who could have noticed it */
        loop_pause(pause);
        printf("at once: %ld ready\n", syscall(SYS_epoll_pwait, set, &event, 1, 5000, NULL, 8L));
        must(!loop_get(loop.channel, NULL));
        loop_drain(&loop, 1);

        loop_arm(loop.cq, 0);
        thread = loop_send_later(&loop, 1, pause);
        printf("later: %ld ready\n", syscall(SYS_epoll_pwait, set, &event, 1, 5000, NULL, 8L));
        must(!loop_get(loop.channel, NULL));
        loop_join(thread);
        loop_drain(&loop, 1);
    }
    close(set);
    loop_close(&loop);
    return 0;
}
