/* SPDX-License-Identifier: MIT */
/* What the scripted programs share: a device of the fake, a channel, CQs that only a script fills. */
#ifndef FASTWAKE_SCRIPT_H
#define FASTWAKE_SCRIPT_H

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "fake.h"

#define must(condition)                                                                            \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            printf("%s:%d: failed: %s (%s)\n", __FILE__, __LINE__, #condition, strerror(errno));   \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static inline struct ibv_context *script_open(int argc, char **argv)
{
    struct ibv_device **list = ibv_get_device_list(NULL), **device = list;
    struct ibv_context *context;

    setvbuf(stdout, NULL, _IOLBF, 0);
    if (argc != 2) {
        printf("usage: %s DEVICE\n", argv[0]);
        exit(2);
    }
    while (*device && strcmp(ibv_get_device_name(*device), argv[1]))
        device++;
    must(*device);
    must(context = ibv_open_device(*device));
    ibv_free_device_list(list);
    return context;
}

static inline void script_pause(unsigned microseconds)
{
    struct timespec left = {microseconds / 1000000, microseconds % 1000000 * 1000L};

    while (nanosleep(&left, &left) && errno == EINTR)
        ;
}

/* get and acknowledge; 0 or errno. */
static inline int script_get(struct ibv_comp_channel *channel, struct ibv_cq **cq)
{
    struct ibv_cq *got;
    void *context;

    if (ibv_get_cq_event(channel, &got, &context))
        return errno;
    must(got->channel == channel && context == got->cq_context);
    ibv_ack_cq_events(got, 1);
    if (cq)
        *cq = got;
    return 0;
}

/* The same without waiting. */
static inline int script_try_get(struct ibv_comp_channel *channel)
{
    int flags = fcntl(channel->fd, F_GETFL), error;

    must(!fcntl(channel->fd, F_SETFL, flags | O_NONBLOCK));
    error = script_get(channel, NULL);
    must(!fcntl(channel->fd, F_SETFL, flags));
    return error;
}

struct script_later {
    struct ibv_cq *cq;
    unsigned n, microseconds;
    int solicited;
    enum ibv_wc_status status;
};

static inline void *script_run_later(void *arg)
{
    struct script_later *later = arg;

    script_pause(later->microseconds);
    must(!fake_complete(later->cq, later->n, later->solicited, later->status));
    return NULL;
}

/* fake_complete after a while, from another thread; `later` lives until it is joined. */
static inline pthread_t script_later(struct script_later *later)
{
    pthread_t thread;

    must(!pthread_create(&thread, NULL, script_run_later, later));
    return thread;
}

static inline const char *script_said(int error)
{
    return error == 0 ? "an event" : error == EAGAIN ? "EAGAIN" : strerror(error);
}

#endif
