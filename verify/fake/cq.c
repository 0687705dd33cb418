/* SPDX-License-Identifier: MIT */
/* Completion queues: a ring that holds exactly as many entries as were asked for, and the arm. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "state.h"

SUCCESSOR(ibv_create_cq);

pthread_mutex_t fake_lock = PTHREAD_MUTEX_INITIALIZER;

static enum fake_kind kind_of(struct fake_cq *cq)
{
    return container(cq->cq.context, struct fake_context, verbs.context)->kind;
}

int fake_push(struct fake_cq *cq, const struct ibv_wc *wc, int solicited)
{
    if (cq->count == (unsigned)cq->cq.cqe)
        return -1;
    cq->ring[(cq->head + cq->count++) % cq->cq.cqe] = *wc;
    if (cq->arm == FAKE_ARM_NEXT ||
        (cq->arm == FAKE_ARM_SOL && (solicited || wc->status != IBV_WC_SUCCESS)))
        fake_fire(cq);
    return 0;
}

int fake_complete(struct ibv_cq *ibv, unsigned n, int solicited, enum ibv_wc_status status)
{
    struct fake_cq *cq = container(ibv, struct fake_cq, cq);
    int rc = 0;

    pthread_mutex_lock(&fake_lock);
    for (unsigned i = 0; i < n && !rc; i++) {
        struct ibv_wc wc = {
            .wr_id = cq->completed + 1, .status = status, .opcode = IBV_WC_RECV, .qp_num = 1};

        rc = fake_push(cq, &wc, solicited);
        if (!rc)
            cq->completed++;
    }
    pthread_mutex_unlock(&fake_lock);
    return rc;
}

static int take(struct fake_cq *cq, struct ibv_wc *wc)
{
    if (!cq->count)
        return 0;
    *wc = cq->ring[cq->head];
    cq->head = (cq->head + 1) % cq->cq.cqe;
    cq->count--;
    return 1;
}

int fake_poll_cq(struct ibv_cq *ibv, int n, struct ibv_wc *wc)
{
    struct fake_cq *cq = container(ibv, struct fake_cq, cq);
    int got = 0;

    fake_count(FAKE_POLL);
    fake_pass(FAKE_POLL_BEFORE, ibv);
    pthread_mutex_lock(&fake_lock);
    while (got < n && take(cq, &wc[got]))
        got++;
    pthread_mutex_unlock(&fake_lock);
    fake_pass(FAKE_POLL_AFTER, ibv);
    return got;
}

int fake_req_notify_cq(struct ibv_cq *ibv, int solicited_only)
{
    struct fake_cq *cq = container(ibv, struct fake_cq, cq);
    int rc = 0;

    fake_count(solicited_only ? FAKE_ARM_SOLICITED : FAKE_ARM);
    fake_pass(FAKE_ARM_BEFORE, ibv);
    pthread_mutex_lock(&fake_lock);
    if (solicited_only && fake_solicited_refusal)
        rc = fake_solicited_refusal;
    else if (kind_of(cq) == FAKE_SN && cq->arm_sn < cq->done_sn)
        ; /* this number was answered already; the hardware waits for another one */
    else if (cq->arm != FAKE_ARM_NEXT)
        cq->arm = solicited_only ? FAKE_ARM_SOL : FAKE_ARM_NEXT;
    if (!rc && kind_of(cq) == FAKE_EAGER && cq->count && cq->arm == FAKE_ARM_NEXT)
        fake_fire(cq);
    pthread_mutex_unlock(&fake_lock);
    fake_pass(FAKE_ARM_AFTER, ibv);
    return rc;
}

void fake_cq_event(struct ibv_cq *ibv)
{
    struct fake_cq *cq = container(ibv, struct fake_cq, cq);

    fake_count(FAKE_CQ_EVENT);
    pthread_mutex_lock(&fake_lock);
    cq->arm_sn++;
    pthread_mutex_unlock(&fake_lock);
}

void fake_purge(struct fake_cq *cq, uint32_t qp_num)
{
    unsigned kept = 0;

    for (unsigned i = 0; i < cq->count; i++) {
        struct ibv_wc wc = cq->ring[(cq->head + i) % cq->cq.cqe];

        if (wc.qp_num != qp_num)
            cq->ring[(cq->head + kept++) % cq->cq.cqe] = wc;
    }
    cq->count = kept;
}

/* Extended polling. The entry that is looked at stays in the ring until the next one is asked for. */
static int start_poll(struct ibv_cq_ex *ex, struct ibv_poll_cq_attr *attr)
{
    struct fake_cq *cq = container(ex, struct fake_cq, ex);
    int rc = ENOENT;

    if (attr->comp_mask)
        return EINVAL;
    fake_count(FAKE_POLL);
    fake_pass(FAKE_POLL_BEFORE, &cq->cq);
    pthread_mutex_lock(&fake_lock);
    if (cq->count) {
        ex->wr_id = cq->ring[cq->head].wr_id;
        ex->status = cq->ring[cq->head].status;
        rc = 0;
    }
    pthread_mutex_unlock(&fake_lock);
    return rc;
}

static void end_poll(struct ibv_cq_ex *ex)
{
    struct fake_cq *cq = container(ex, struct fake_cq, ex);
    struct ibv_wc wc;

    pthread_mutex_lock(&fake_lock);
    take(cq, &wc);
    pthread_mutex_unlock(&fake_lock);
    fake_pass(FAKE_POLL_AFTER, &cq->cq);
}

static int next_poll(struct ibv_cq_ex *ex)
{
    struct fake_cq *cq = container(ex, struct fake_cq, ex);
    struct ibv_wc wc;
    int rc = ENOENT;

    pthread_mutex_lock(&fake_lock);
    if (cq->count > 1) {
        take(cq, &wc);
        ex->wr_id = cq->ring[cq->head].wr_id;
        ex->status = cq->ring[cq->head].status;
        rc = 0;
    }
    pthread_mutex_unlock(&fake_lock);
    return rc;
}

#define READER(type, name, field)                                                                  \
    static type name(struct ibv_cq_ex *ex)                                                         \
    {                                                                                              \
        struct fake_cq *cq = container(ex, struct fake_cq, ex);                                    \
        return cq->ring[cq->head].field;                                                           \
    }
READER(enum ibv_wc_opcode, read_opcode, opcode)
READER(uint32_t, read_vendor_err, vendor_err)
READER(uint32_t, read_byte_len, byte_len)
READER(__be32, read_imm_data, imm_data)
READER(uint32_t, read_qp_num, qp_num)
READER(uint32_t, read_src_qp, src_qp)
READER(unsigned int, read_wc_flags, wc_flags)

static struct fake_cq *create(struct ibv_context *context, int cqe, void *cq_context,
                              struct ibv_comp_channel *channel, int comp_vector)
{
    struct fake_cq *cq;

    fake_count(FAKE_CREATE_CQ);
    if (cqe < 1 || comp_vector < 0 || comp_vector >= context->num_comp_vectors) {
        errno = EINVAL;
        return NULL;
    }
    cq = calloc(1, sizeof *cq);
    if (!cq || !(cq->ring = calloc(cqe, sizeof *cq->ring))) {
        free(cq);
        errno = ENOMEM;
        return NULL;
    }
    cq->cq.context = context;
    cq->cq.channel = channel;
    cq->cq.cq_context = cq_context;
    cq->cq.cqe = cqe;
    pthread_mutex_init(&cq->cq.mutex, NULL);
    pthread_cond_init(&cq->cq.cond, NULL);
    if (channel) {
        pthread_mutex_lock(&context->mutex);
        channel->refcnt++;
        pthread_mutex_unlock(&context->mutex);
    }
    return cq;
}

struct ibv_cq *ibv_create_cq(struct ibv_context *context, int cqe, void *cq_context,
                             struct ibv_comp_channel *channel, int comp_vector)
{
    struct fake_cq *cq = create(context, cqe, cq_context, channel, comp_vector);

    return cq ? &cq->cq : NULL;
}

struct ibv_cq_ex *fake_create_cq_ex(struct ibv_context *context, struct ibv_cq_init_attr_ex *attr)
{
    struct fake_cq *cq =
        create(context, attr->cqe, attr->cq_context, attr->channel, attr->comp_vector);

    if (!cq)
        return NULL;
    cq->ex.start_poll = start_poll;
    cq->ex.next_poll = next_poll;
    cq->ex.end_poll = end_poll;
    cq->ex.read_opcode = read_opcode;
    cq->ex.read_vendor_err = read_vendor_err;
    cq->ex.read_byte_len = read_byte_len;
    cq->ex.read_imm_data = read_imm_data;
    cq->ex.read_qp_num = read_qp_num;
    cq->ex.read_src_qp = read_src_qp;
    cq->ex.read_wc_flags = read_wc_flags;
    return &cq->ex;
}

int ibv_resize_cq(struct ibv_cq *ibv, int cqe)
{
    struct fake_cq *cq = container(ibv, struct fake_cq, cq);
    struct ibv_wc *ring = cqe < 1 ? NULL : calloc(cqe, sizeof *ring);
    int rc = ring ? 0 : EINVAL;

    pthread_mutex_lock(&fake_lock);
    if (ring && cq->count > (unsigned)cqe)
        rc = EINVAL;
    if (!rc) {
        for (unsigned i = 0; i < cq->count; i++)
            ring[i] = cq->ring[(cq->head + i) % ibv->cqe];
        free(cq->ring);
        cq->ring = ring;
        cq->head = 0;
        ibv->cqe = cqe;
        ring = NULL;
    }
    pthread_mutex_unlock(&fake_lock);
    free(ring);
    return rc;
}
