/* SPDX-License-Identifier: MIT */
/*
 * What the files of the fake share. One lock guards all of it; hooks of the script run outside.
 */
#ifndef FASTWAKE_FAKE_STATE_H
#define FASTWAKE_FAKE_STATE_H

#include <pthread.h>
#include <stdint.h>

#include "fake.h"

/* The macros of verbs.h would rename our definitions. */
#undef ibv_query_port
#undef ibv_reg_mr
#undef ibv_reg_mr_iova

#define container(pointer, type, member) \
    ((type *)((char *)(pointer)-__builtin_offsetof(type, member)))

/* This definition is the IBVERBS_1.1 form, and the default one, of a name that 1.0 has as well. */
#define SUCCESSOR(name) __asm__(".symver " #name ", " #name "@@@IBVERBS_1.1")

enum fake_kind { FAKE_PLAIN, FAKE_EAGER, FAKE_SN, FAKE_KINDS };

struct fake_device {
    struct ibv_device device;
    enum fake_kind kind;
};

/* verbs_context comes last: it ends in the ibv_context that the application sees. */
struct fake_context {
    enum fake_kind kind;
    struct verbs_context verbs;
};

struct fake_channel {
    struct ibv_comp_channel channel; /* fd: the reading end */
    int write_fd;                    /* -1 once unplugged */
};

enum fake_arm { FAKE_ARM_NONE, FAKE_ARM_SOL, FAKE_ARM_NEXT };

struct fake_cq {
    union {
        struct ibv_cq cq;
        struct ibv_cq_ex ex;
    };
    struct ibv_wc *ring; /* cq.cqe entries, oldest at head */
    unsigned head, count;
    uint64_t completed; /* numbers the scripted completions */
    enum fake_arm arm;
    unsigned arm_sn;  /* FAKE_SN: goes with the next arm, moved by cq_event */
    unsigned done_sn; /* FAKE_SN: one past the last number that fired */
    unsigned fired, qps;
};

struct fake_wr {
    struct fake_wr *next;
    uint64_t wr_id;
    unsigned flags, opcode, imm, num_sge;
    uint64_t remote;
    struct ibv_sge sge[8];
    char inlined[256];
};

struct fake_queue {
    struct fake_wr *first, **last;
};

struct fake_qp {
    struct ibv_qp qp;
    struct fake_qp *next;
    struct ibv_qp_init_attr init;
    struct ibv_qp_attr attr;
    struct fake_queue recv, send; /* posted; sends that found no receive yet */
};

extern pthread_mutex_t fake_lock;

/* script.c */
void fake_pass(enum fake_point point, struct ibv_cq *cq);
void fake_count(enum fake_call call);
extern int fake_create_qp_error, fake_solicited_refusal;

/* cq.c: with the lock held */
int fake_push(struct fake_cq *cq, const struct ibv_wc *wc, int solicited);
void fake_purge(struct fake_cq *cq, uint32_t qp_num);

/* channel.c: with the lock held */
void fake_fire(struct fake_cq *cq);

/* Ops that device.c puts into a context. */
int fake_poll_cq(struct ibv_cq *cq, int n, struct ibv_wc *wc);
int fake_req_notify_cq(struct ibv_cq *cq, int solicited_only);
void fake_cq_event(struct ibv_cq *cq);
struct ibv_cq_ex *fake_create_cq_ex(struct ibv_context *context, struct ibv_cq_init_attr_ex *attr);
int fake_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad);
int fake_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);

#endif
