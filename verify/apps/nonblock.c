/* SPDX-License-Identifier: MIT */
/* O_NONBLOCK on the channel: EAGAIN where nothing is there; no effect on who already waits. */
#include "loop.h"

#include <fcntl.h>
#include <sys/ioctl.h>

static struct loop loop;

static void set(int on, int by_ioctl)
{
    int flags = fcntl(loop.channel->fd, F_GETFL);

    if (by_ioctl)
        must(!ioctl(loop.channel->fd, FIONBIO, &on));
    else
        must(!fcntl(loop.channel->fd, F_SETFL, on ? flags | O_NONBLOCK : flags & ~O_NONBLOCK));
}

static void *sets_while_blocked(void *by_ioctl)
{
    loop_pause(50);
    set(1, by_ioctl != NULL);
    loop_pause(20);
    loop_send(&loop, 1);
    return NULL;
}

static void once(int by_ioctl)
{
    pthread_t thread;

    printf("by %s\n", by_ioctl ? "FIONBIO" : "fcntl");
    set(1, by_ioctl);
    loop_arm(loop.cq, 0);
    printf("nothing there: %s\n", loop_error(loop_get(loop.channel, NULL)));
    loop_send(&loop, 1);
    /* The event follows its completion; a program of this kind asks again. */
    while (loop_get(loop.channel, NULL))
        must(errno == EAGAIN);
    loop_drain(&loop, 1);
    printf("taken: %s\n", loop_error(loop_get(loop.channel, NULL)));

    set(0, by_ioctl);
    loop_arm(loop.cq, 0);
    must(!pthread_create(&thread, NULL, sets_while_blocked, by_ioctl ? &loop : NULL));
    printf("set during the wait: %s\n", loop_error(loop_get(loop.channel, NULL)));
    loop_join(thread);
    loop_drain(&loop, 1);
    printf("then: %s\n", loop_error(loop_get(loop.channel, NULL)));
    set(0, by_ioctl);
}

int main(int argc, char **argv)
{
    loop_open(&loop, argc, argv);
    once(0);
    once(1);
    loop_close(&loop);
    return 0;
}
