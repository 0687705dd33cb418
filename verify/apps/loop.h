/* SPDX-License-Identifier: MIT */
/*
 * Set-up shared by the event-mode programs of this folder: RC queue pairs that are connected to each
 * other within the process. `near` is the program's end, whose receives complete on a CQ with a
 * completion channel; `far` is the peer, whose sends make that happen.
 *
 * Every program takes the name of a device, shows one behaviour of event mode, prints what it
 * observes and exits 0. What it prints is the same on every run, so that a run under the shim can be
 * compared with one without it, word for word.
 */
#ifndef FASTWAKE_LOOP_H
#define FASTWAKE_LOOP_H

#include <errno.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct pair {
    struct ibv_qp *near, *far;
    struct ibv_cq *near_cq; /* receives of near */
    struct ibv_cq *far_cq;  /* sends and receives of far; no channel */
    struct ibv_cq *idle_cq; /* sends of near; no channel */
};

struct loop {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_mr *mr;
    char *memory;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq; /* pair.near_cq, on the channel */
    struct pair pair;
};

/* Ends the program with a message if a call failed that never fails where the device works. */
#define must(condition)                                                                            \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            printf("%s:%d: failed: %s (%s)\n", __FILE__, __LINE__, #condition, strerror(errno));   \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

/* Device, PD, memory, one channel, one CQ on it, one connected pair with receives posted. */
void loop_open(struct loop *loop, int argc, char **argv);

/* Destroys all of it; every event must have been acknowledged. */
void loop_close(struct loop *loop);

/* Another connected pair, whose near end receives on `cq`. */
void pair_open(struct loop *loop, struct pair *pair, struct ibv_cq *cq);
void pair_close(struct pair *pair);

/* The peer sends n messages and sees them completed. */
void pair_send(struct loop *loop, struct pair *pair, unsigned n, unsigned flags);
void loop_send(struct loop *loop, unsigned n);

/* The near end sends one message to the peer; the peer polls for it. */
void pair_answer(struct loop *loop, struct pair *pair);
void pair_await_answer(struct loop *loop, struct pair *pair);

/* The same as loop_send in another thread, after a pause in milliseconds. Joined by loop_join. */
pthread_t loop_send_later(struct loop *loop, unsigned n, unsigned pause);
void loop_join(pthread_t thread);

/* Arms for the next completion, or the next solicited one. */
void loop_arm(struct ibv_cq *cq, int solicited_only);

/* ibv_get_cq_event and its acknowledgement. Returns 0, or errno. Checks what it hands out. */
int loop_get(struct ibv_comp_channel *channel, struct ibv_cq **cq);

/* Polls one completion; 1 if there was one. Posts its receive again. */
int loop_poll(struct loop *loop, struct pair *pair);

/* Polls until n completions were seen in all. */
void loop_drain(struct loop *loop, unsigned n);

/*
 * Two ordinary waits, after which a channel may be served: one that really waits, and one whose
 * completion is there already.
 */
void loop_first_waits(struct loop *loop);

/* Says whether an event is there, without waiting for one: O_NONBLOCK for one get. */
void loop_say_event(struct loop *loop, const char *when);

void loop_pause(unsigned milliseconds);

/* The name of an errno that event mode knows. */
const char *loop_error(int error);

#endif
