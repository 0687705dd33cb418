/* SPDX-License-Identifier: MIT */
/* poll, select and epoll (level and edge) on the channel's descriptor, then get. */
#define _GNU_SOURCE
#include "loop.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/select.h>

static int by_poll(int fd, int timeout)
{
    struct pollfd pollfd = {.fd = fd, .events = POLLIN};
    int n = poll(&pollfd, 1, timeout);

    must(n <= 0 || pollfd.revents == POLLIN);
    return n;
}

static int by_ppoll(int fd, int timeout)
{
    struct pollfd pollfd = {.fd = fd, .events = POLLIN};
    struct timespec time = {timeout / 1000, timeout % 1000 * 1000000L};

    return ppoll(&pollfd, 1, &time, NULL);
}

static int by_select(int fd, int timeout)
{
    struct timeval time = {timeout / 1000, timeout % 1000 * 1000};
    fd_set set;

    FD_ZERO(&set);
    FD_SET(fd, &set);
    return select(fd + 1, &set, NULL, NULL, &time);
}

static int by_epoll(int fd, int timeout)
{
    struct epoll_event event = {.events = EPOLLIN};
    int set = epoll_create1(EPOLL_CLOEXEC), n;

    must(set >= 0);
    must(!epoll_ctl(set, EPOLL_CTL_ADD, fd, &event));
    n = epoll_wait(set, &event, 1, timeout);
    close(set);
    return n;
}

static int edges; /* an epoll descriptor that lives through the test */

static int by_edge(int fd, int timeout)
{
    struct epoll_event event = {.events = EPOLLIN | EPOLLET};

    if (edges < 0) {
        must((edges = epoll_create1(EPOLL_CLOEXEC)) >= 0);
        must(!epoll_ctl(edges, EPOLL_CTL_ADD, fd, &event));
    }
    return epoll_wait(edges, &event, 1, timeout);
}

static const struct way {
    const char *name;
    int (*wait)(int fd, int timeout);
} ways[] = {{"poll", by_poll},
            {"ppoll", by_ppoll},
            {"select", by_select},
            {"epoll", by_epoll},
            {"edge-triggered epoll", by_edge}};

/* Blocking waits, after which a channel may be served; then readiness; then blocking again. */
static void try_way(struct loop *loop, const struct way *way)
{
    pthread_t thread;

    edges = -1;
    for (int round = 0; round < 3; round++) {
        loop_first_waits(loop);
        loop_arm(loop->cq, 0);
        printf("%s, nothing there: %s\n", way->name,
               way->wait(loop->channel->fd, 0) ? "ready" : "not ready");
        thread = loop_send_later(loop, 1, 5);
        printf("%s: %s\n", way->name, way->wait(loop->channel->fd, 5000) == 1 ? "ready" : "timeout");
        loop_join(thread);
        loop_say_event(loop, "then get");
        loop_say_event(loop, "and again");
        loop_drain(loop, 1);

        /* The completion first, then the look. */
        loop_arm(loop->cq, 0);
        loop_send(loop, 1);
        printf("%s, already there: %s\n", way->name,
               way->wait(loop->channel->fd, 5000) == 1 ? "ready" : "timeout");
        loop_say_event(loop, "then get");
        loop_drain(loop, 1);
    }
    if (edges >= 0)
        close(edges);
}

int main(int argc, char **argv)
{
    struct loop loop;

    loop_open(&loop, argc, argv);
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++)
        try_way(&loop, &ways[i]);
    loop_close(&loop);
    return 0;
}
