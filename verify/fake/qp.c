/* SPDX-License-Identifier: MIT */
/*
 * RC queue pairs that talk to each other within the process: SEND, RDMA WRITE and READ, inline data,
 * immediate data, flush in the error state. A SEND without a posted receive waits for one.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "state.h"

static struct fake_qp *all;
static uint32_t last_number = 16;

static struct fake_cq *cq_of(struct ibv_cq *cq)
{
    return container(cq, struct fake_cq, cq);
}

static void append(struct fake_queue *queue, struct fake_wr *wr)
{
    wr->next = NULL;
    *queue->last = wr;
    queue->last = &wr->next;
}

static struct fake_wr *shift(struct fake_queue *queue)
{
    struct fake_wr *wr = queue->first;

    if (wr && !(queue->first = wr->next))
        queue->last = &queue->first;
    return wr;
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *init)
{
    struct fake_qp *qp;

    fake_count(FAKE_CREATE_QP);
    if (fake_create_qp_error) {
        errno = fake_create_qp_error;
        return NULL;
    }
    if (!(qp = calloc(1, sizeof *qp)))
        return NULL;
    init->cap.max_inline_data = 256;
    qp->init = *init;
    qp->recv.last = &qp->recv.first;
    qp->send.last = &qp->send.first;
    qp->qp.context = pd->context;
    qp->qp.qp_context = init->qp_context;
    qp->qp.pd = pd;
    qp->qp.send_cq = init->send_cq;
    qp->qp.recv_cq = init->recv_cq;
    qp->qp.qp_type = init->qp_type;
    qp->qp.state = IBV_QPS_RESET;
    pthread_mutex_init(&qp->qp.mutex, NULL);
    pthread_cond_init(&qp->qp.cond, NULL);
    pthread_mutex_lock(&fake_lock);
    qp->qp.qp_num = ++last_number;
    qp->next = all;
    all = qp;
    cq_of(init->send_cq)->qps++;
    cq_of(init->recv_cq)->qps++;
    pthread_mutex_unlock(&fake_lock);
    return &qp->qp;
}

static void complete(struct fake_qp *qp, int recv, struct fake_wr *wr, enum ibv_wc_status status,
                     enum ibv_wc_opcode opcode, uint32_t length, struct fake_wr *from)
{
    struct ibv_wc wc = {
        .wr_id = wr->wr_id,
        .status = status,
        .opcode = opcode,
        .byte_len = length,
        .qp_num = qp->qp.qp_num,
    };

    if (from && (from->opcode == IBV_WR_SEND_WITH_IMM || from->opcode == IBV_WR_RDMA_WRITE_WITH_IMM)) {
        wc.imm_data = from->imm;
        wc.wc_flags = IBV_WC_WITH_IMM;
    }
    fake_push(cq_of(recv ? qp->qp.recv_cq : qp->qp.send_cq), &wc,
              from && from->flags & IBV_SEND_SOLICITED);
    free(wr);
}

static void flush(struct fake_qp *qp)
{
    struct fake_wr *wr;

    while ((wr = shift(&qp->send)))
        complete(qp, 0, wr, IBV_WC_WR_FLUSH_ERR, IBV_WC_SEND, 0, NULL);
    while ((wr = shift(&qp->recv)))
        complete(qp, 1, wr, IBV_WC_WR_FLUSH_ERR, IBV_WC_RECV, 0, NULL);
}

static void forget(struct fake_qp *qp)
{
    struct fake_wr *wr;

    while ((wr = shift(&qp->send)) || (wr = shift(&qp->recv)))
        free(wr);
    fake_purge(cq_of(qp->qp.send_cq), qp->qp.qp_num);
    fake_purge(cq_of(qp->qp.recv_cq), qp->qp.qp_num);
}

static uint32_t length_of(const struct fake_wr *wr)
{
    uint32_t length = 0;

    for (unsigned i = 0; i < wr->num_sge; i++)
        length += wr->sge[i].length;
    return length;
}

/* Copies between a scatter list and flat memory; inline data was gathered when it was posted. */
static void gather(const struct fake_wr *wr, char *flat)
{
    if (wr->flags & IBV_SEND_INLINE) {
        memcpy(flat, wr->inlined, length_of(wr));
        return;
    }
    for (unsigned i = 0; i < wr->num_sge; flat += wr->sge[i++].length)
        memcpy(flat, (void *)(uintptr_t)wr->sge[i].addr, wr->sge[i].length);
}

static void scatter(const struct fake_wr *wr, const char *flat, uint32_t length)
{
    for (unsigned i = 0; i < wr->num_sge && length; i++) {
        uint32_t part = wr->sge[i].length < length ? wr->sge[i].length : length;

        memcpy((void *)(uintptr_t)wr->sge[i].addr, flat, part);
        flat += part;
        length -= part;
    }
}

static enum ibv_wc_opcode completion_of(unsigned opcode)
{
    switch (opcode) {
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_WRITE_WITH_IMM:
        return IBV_WC_RDMA_WRITE;
    case IBV_WR_RDMA_READ:
        return IBV_WC_RDMA_READ;
    default:
        return IBV_WC_SEND;
    }
}

/* Carries out the sends of a queue pair for as long as the other side has room for them. */
static void progress(struct fake_qp *qp)
{
    struct fake_qp *peer = all;
    struct fake_wr *wr;

    while (peer && peer->qp.qp_num != qp->attr.dest_qp_num)
        peer = peer->next;
    while (peer && qp->qp.state == IBV_QPS_RTS && (wr = qp->send.first)) {
        uint32_t length = length_of(wr);
        int takes_recv = wr->opcode == IBV_WR_SEND || wr->opcode == IBV_WR_SEND_WITH_IMM ||
                         wr->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
        struct fake_wr *recv = NULL;
        enum ibv_wc_status status = IBV_WC_SUCCESS;
        char *flat;

        if (takes_recv && !peer->recv.first)
            return;
        shift(&qp->send);
        if (takes_recv)
            recv = shift(&peer->recv);
        flat = malloc(length + 1);
        if (wr->opcode == IBV_WR_RDMA_READ) {
            scatter(wr, (void *)(uintptr_t)wr->remote, length);
        } else {
            gather(wr, flat);
            if (wr->opcode != IBV_WR_SEND && wr->opcode != IBV_WR_SEND_WITH_IMM)
                memcpy((void *)(uintptr_t)wr->remote, flat, length);
            else if (length_of(recv) < length)
                status = IBV_WC_REM_INV_REQ_ERR;
            else
                scatter(recv, flat, length);
        }
        free(flat);
        if (recv)
            complete(peer, 1, recv, status ? IBV_WC_LOC_LEN_ERR : IBV_WC_SUCCESS,
                     wr->opcode == IBV_WR_RDMA_WRITE_WITH_IMM ? IBV_WC_RECV_RDMA_WITH_IMM
                                                              : IBV_WC_RECV,
                     length, wr);
        if (status || qp->init.sq_sig_all || wr->flags & IBV_SEND_SIGNALED)
            complete(qp, 0, wr, status, completion_of(wr->opcode), length, NULL);
        else
            free(wr);
    }
}

static struct fake_wr *copy(uint64_t wr_id, const struct ibv_sge *sge, int num_sge)
{
    struct fake_wr *wr = num_sge <= 8 ? calloc(1, sizeof *wr) : NULL;

    if (!wr)
        return NULL;
    wr->wr_id = wr_id;
    wr->num_sge = num_sge;
    memcpy(wr->sge, sge, num_sge * sizeof *sge);
    return wr;
}

int fake_post_send(struct ibv_qp *ibv, struct ibv_send_wr *list, struct ibv_send_wr **bad)
{
    struct fake_qp *qp = container(ibv, struct fake_qp, qp);
    int rc = 0;

    fake_count(FAKE_POST_SEND);
    pthread_mutex_lock(&fake_lock);
    for (; list && !rc; list = list->next) {
        struct fake_wr *wr = NULL;

        if (ibv->state == IBV_QPS_RTS || ibv->state == IBV_QPS_ERR)
            wr = copy(list->wr_id, list->sg_list, list->num_sge);
        if (wr && list->send_flags & IBV_SEND_INLINE && length_of(wr) <= sizeof wr->inlined)
            gather(wr, wr->inlined);
        if (!wr || (list->send_flags & IBV_SEND_INLINE && length_of(wr) > sizeof wr->inlined)) {
            free(wr);
            *bad = list;
            rc = EINVAL;
            break;
        }
        wr->flags = list->send_flags;
        wr->opcode = list->opcode;
        wr->imm = list->imm_data;
        wr->remote = list->wr.rdma.remote_addr;
        append(&qp->send, wr);
    }
    if (ibv->state == IBV_QPS_ERR)
        flush(qp);
    else
        progress(qp);
    pthread_mutex_unlock(&fake_lock);
    return rc;
}

int fake_post_recv(struct ibv_qp *ibv, struct ibv_recv_wr *list, struct ibv_recv_wr **bad)
{
    struct fake_qp *qp = container(ibv, struct fake_qp, qp);
    struct fake_qp *peer;
    int rc = 0;

    pthread_mutex_lock(&fake_lock);
    for (; list && !rc; list = list->next) {
        struct fake_wr *wr = NULL;

        if (ibv->state != IBV_QPS_RESET)
            wr = copy(list->wr_id, list->sg_list, list->num_sge);
        if (!wr) {
            *bad = list;
            rc = EINVAL;
            break;
        }
        append(&qp->recv, wr);
    }
    if (ibv->state == IBV_QPS_ERR)
        flush(qp);
    for (peer = all; peer; peer = peer->next)
        if (peer->attr.dest_qp_num == ibv->qp_num)
            progress(peer);
    pthread_mutex_unlock(&fake_lock);
    return rc;
}

int ibv_modify_qp(struct ibv_qp *ibv, struct ibv_qp_attr *attr, int mask)
{
    struct fake_qp *qp = container(ibv, struct fake_qp, qp);

    pthread_mutex_lock(&fake_lock);
    if (mask & IBV_QP_DEST_QPN)
        qp->attr.dest_qp_num = attr->dest_qp_num;
    if (mask & IBV_QP_STATE) {
        ibv->state = attr->qp_state;
        if (ibv->state == IBV_QPS_ERR)
            flush(qp);
        else if (ibv->state == IBV_QPS_RESET)
            forget(qp);
    }
    pthread_mutex_unlock(&fake_lock);
    return 0;
}

int ibv_query_qp(struct ibv_qp *ibv, struct ibv_qp_attr *attr, int mask,
                 struct ibv_qp_init_attr *init)
{
    struct fake_qp *qp = container(ibv, struct fake_qp, qp);

    (void)mask;
    *attr = qp->attr;
    attr->qp_state = attr->cur_qp_state = ibv->state;
    attr->cap = qp->init.cap;
    *init = qp->init;
    return 0;
}

int ibv_destroy_qp(struct ibv_qp *ibv)
{
    struct fake_qp *qp = container(ibv, struct fake_qp, qp);
    struct fake_qp **link = &all;

    pthread_mutex_lock(&fake_lock);
    while (*link != qp)
        link = &(*link)->next;
    *link = qp->next;
    forget(qp);
    cq_of(ibv->send_cq)->qps--;
    cq_of(ibv->recv_cq)->qps--;
    pthread_mutex_unlock(&fake_lock);
    free(qp);
    return 0;
}
