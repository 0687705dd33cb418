/* SPDX-License-Identifier: MIT */
/*
 * The script of a scripted libibverbs: what a test program may ask of the fake device.
 *
 * The fake is a libibverbs.so.1 of its own, with the symbol versions of the real one and devices
 * that live in the calling process. A test chooses what completes, when, and what happens at which
 * point inside the provider, so that a race between arming, polling and completing is an ordinary
 * sequence of calls. Devices:
 *
 *   fake0        arms as rxe does: completions already present do not fire
 *   fake_eager   arming fires at once if unpolled completions are present
 *   fake_sn      arms carry a sequence number that the provider's cq_event op moves on, as mlx5's
 *                do: arming twice with one number does nothing the second time
 *
 * Programs that use only verbs run on them by name; those that use this header link the fake.
 */
#ifndef FASTWAKE_FAKE_H
#define FASTWAKE_FAKE_H

#include <infiniband/verbs.h>

/* Where a hook may run. No lock of the fake is held there. */
enum fake_point {
    FAKE_ARM_BEFORE,  /* req_notify_cq was entered */
    FAKE_ARM_AFTER,   /* the arm stands, req_notify_cq is about to return */
    FAKE_POLL_BEFORE, /* poll_cq was entered */
    FAKE_POLL_AFTER,  /* poll_cq has taken what it returns */
    FAKE_GET_BEFORE,  /* get_cq_event is about to read; the CQ is NULL */
    FAKE_GET_AFTER,   /* it has read a record; the cq_event op has not run yet */
    FAKE_POINTS
};

typedef void fake_hook(struct ibv_cq *cq, void *arg);

/*
 * Runs `hook` once, when the point is passed for the nth time from now on (1: the next time), in
 * the thread that passes it. One hook a point; a new one replaces it, NULL takes it away.
 */
void fake_at(enum fake_point point, unsigned nth, fake_hook *hook, void *arg);

/*
 * Adds n completions to the CQ, wr_id counting on from 1 for each CQ. A solicited one, and one that
 * is not a success, also fires a solicited arm. Returns 0, or -1 if the ring was full before all
 * were added.
 */
int fake_complete(struct ibv_cq *cq, unsigned n, int solicited, enum ibv_wc_status status);

/* Calls that reached the provider or the library itself, since the program's start. */
enum fake_call {
    FAKE_POLL,
    FAKE_ARM,
    FAKE_ARM_SOLICITED,
    FAKE_CQ_EVENT, /* the provider's cq_event op */
    FAKE_GET,
    FAKE_ACK,
    FAKE_CREATE_CQ,
    FAKE_DESTROY_CQ,
    FAKE_CREATE_QP,
    FAKE_POST_SEND,
    FAKE_COMPAT, /* a function of version IBVERBS_1.0 that has a successor in IBVERBS_1.1 */
    FAKE_CALLS
};
unsigned fake_calls(enum fake_call call);

/* Every create_qp from now on fails with this errno; 0: none does. */
void fake_fail_create_qp(int error);

/* Every solicited-only arm from now on is refused with this return value (efa: EOPNOTSUPP). */
void fake_refuse_solicited(int value);

/* The device is unplugged: a channel that is read reports EIO, now and for ever. */
void fake_unplug(struct ibv_comp_channel *channel);

/* How often the CQ fired: records written to its channel. */
unsigned fake_fired(struct ibv_cq *cq);

#endif
