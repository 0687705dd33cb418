/* SPDX-License-Identifier: MIT */
/* Set-up of the event-mode programs; see loop.h. */
#define _GNU_SOURCE
#include "loop.h"

#include <fcntl.h>
#include <sched.h>
#include <time.h>

enum { MEMORY = 4096, RECEIVES = 256, CQ_SIZE = 512 };

static struct ibv_device *find_device(struct ibv_device **list, const char *name)
{
    for (; *list; list++)
        if (!strcmp(ibv_get_device_name(*list), name))
            return *list;
    printf("no device %s\n", name);
    exit(1);
}

/* RoCE: the GID of an IPv4 address if there is one, as RoCEv2 wants it; else the first. */
static int find_gid(struct ibv_context *context, int entries, union ibv_gid *gid)
{
    static const unsigned char mapped[12] = {[10] = 0xff, [11] = 0xff};

    for (int i = entries - 1; i >= 0; i--)
        if (!ibv_query_gid(context, 1, i, gid) && !memcmp(gid->raw, mapped, sizeof mapped))
            return i;
    must(!ibv_query_gid(context, 1, 0, gid));
    return 0;
}

static void connect_qp(struct loop *loop, struct ibv_qp *qp, struct ibv_qp *peer)
{
    struct ibv_port_attr port;
    struct ibv_qp_attr attr = {
        .qp_state = IBV_QPS_INIT,
        .port_num = 1,
        .qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE,
    };

    must(!ibv_query_port(loop->context, 1, &port));
    must(!ibv_modify_qp(qp, &attr,
                        IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
    attr = (struct ibv_qp_attr){
        .qp_state = IBV_QPS_RTR,
        .path_mtu = IBV_MTU_1024,
        .dest_qp_num = peer->qp_num,
        .max_dest_rd_atomic = 1,
        .min_rnr_timer = 1,
        .ah_attr = {.dlid = port.lid, .port_num = 1},
    };
    if (port.link_layer == IBV_LINK_LAYER_ETHERNET || !port.lid) {
        attr.ah_attr.is_global = 1;
        attr.ah_attr.grh.hop_limit = 1;
        attr.ah_attr.grh.sgid_index =
            find_gid(loop->context, port.gid_tbl_len, &attr.ah_attr.grh.dgid);
    }
    must(!ibv_modify_qp(qp, &attr,
                        IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                            IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
    attr = (struct ibv_qp_attr){
        .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1};
    must(!ibv_modify_qp(qp, &attr,
                        IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                            IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC));
}

static struct ibv_qp *create_qp(struct loop *loop, struct ibv_cq *send_cq, struct ibv_cq *recv_cq)
{
    struct ibv_qp_init_attr init = {
        .send_cq = send_cq,
        .recv_cq = recv_cq,
        .qp_type = IBV_QPT_RC,
        .cap = {.max_send_wr = 64, .max_recv_wr = RECEIVES, .max_send_sge = 1, .max_recv_sge = 1},
    };
    struct ibv_qp *qp = ibv_create_qp(loop->pd, &init);

    must(qp);
    return qp;
}

static void post_receive(struct loop *loop, struct ibv_qp *qp)
{
    struct ibv_sge sge = {(uintptr_t)loop->memory, 64, loop->mr->lkey};
    struct ibv_recv_wr wr = {.sg_list = &sge, .num_sge = 1}, *bad;

    must(!ibv_post_recv(qp, &wr, &bad));
}

static void post_send(struct loop *loop, struct ibv_qp *qp, unsigned flags)
{
    struct ibv_sge sge = {(uintptr_t)loop->memory + 128, 8, loop->mr->lkey};
    struct ibv_send_wr wr = {.sg_list = &sge,
                             .num_sge = 1,
                             .opcode = IBV_WR_SEND,
                             .send_flags = IBV_SEND_SIGNALED | flags},
                       *bad;

    must(!ibv_post_send(qp, &wr, &bad));
}

/* Polls for one completion, letting others run meanwhile. */
static void await(struct ibv_cq *cq)
{
    struct ibv_wc wc;
    int n;

    while (!(n = ibv_poll_cq(cq, 1, &wc)))
        sched_yield();
    must(n == 1);
    must(wc.status == IBV_WC_SUCCESS);
}

void pair_open(struct loop *loop, struct pair *pair, struct ibv_cq *cq)
{
    pair->near_cq = cq;
    must(pair->far_cq = ibv_create_cq(loop->context, CQ_SIZE, NULL, NULL, 0));
    must(pair->idle_cq = ibv_create_cq(loop->context, CQ_SIZE, NULL, NULL, 0));
    pair->near = create_qp(loop, pair->idle_cq, cq);
    pair->far = create_qp(loop, pair->far_cq, pair->far_cq);
    connect_qp(loop, pair->near, pair->far);
    connect_qp(loop, pair->far, pair->near);
    for (int i = 0; i < RECEIVES; i++)
        post_receive(loop, pair->near);
}

void pair_close(struct pair *pair)
{
    must(!ibv_destroy_qp(pair->near));
    must(!ibv_destroy_qp(pair->far));
    must(!ibv_destroy_cq(pair->far_cq));
    must(!ibv_destroy_cq(pair->idle_cq));
}

void loop_open(struct loop *loop, int argc, char **argv)
{
    struct ibv_device **list;

    setvbuf(stdout, NULL, _IOLBF, 0);
    if (argc != 2) {
        printf("usage: %s DEVICE\n", argv[0]);
        exit(2);
    }
    must(list = ibv_get_device_list(NULL));
    must(loop->context = ibv_open_device(find_device(list, argv[1])));
    ibv_free_device_list(list);
    must(loop->pd = ibv_alloc_pd(loop->context));
    must(loop->memory = aligned_alloc(4096, MEMORY));
    memset(loop->memory, 0, MEMORY);
    must(loop->mr = ibv_reg_mr(loop->pd, loop->memory, MEMORY, IBV_ACCESS_LOCAL_WRITE));
    must(loop->channel = ibv_create_comp_channel(loop->context));
    must(loop->cq = ibv_create_cq(loop->context, CQ_SIZE, loop, loop->channel, 0));
    pair_open(loop, &loop->pair, loop->cq);
}

void loop_close(struct loop *loop)
{
    pair_close(&loop->pair);
    must(!ibv_destroy_cq(loop->cq));
    must(!ibv_destroy_comp_channel(loop->channel));
    must(!ibv_dereg_mr(loop->mr));
    must(!ibv_dealloc_pd(loop->pd));
    must(!ibv_close_device(loop->context));
    free(loop->memory);
}

void pair_send(struct loop *loop, struct pair *pair, unsigned n, unsigned flags)
{
    for (unsigned i = 0; i < n; i++) {
        post_send(loop, pair->far, flags);
        await(pair->far_cq);
    }
}

void loop_send(struct loop *loop, unsigned n)
{
    pair_send(loop, &loop->pair, n, 0);
}

void pair_answer(struct loop *loop, struct pair *pair)
{
    post_send(loop, pair->near, 0);
    await(pair->idle_cq);
}

void pair_await_answer(struct loop *loop, struct pair *pair)
{
    /* The receive is posted late on purpose: a sender that runs ahead waits for it. */
    post_receive(loop, pair->far);
    await(pair->far_cq);
}

struct later {
    struct loop *loop;
    unsigned n, pause;
};

static void *send_later(void *arg)
{
    struct later later = *(struct later *)arg;

    free(arg);
    loop_pause(later.pause);
    loop_send(later.loop, later.n);
    return NULL;
}

pthread_t loop_send_later(struct loop *loop, unsigned n, unsigned pause)
{
    struct later *later = malloc(sizeof *later);
    pthread_t thread;

    must(later);
    *later = (struct later){loop, n, pause};
    must(!pthread_create(&thread, NULL, send_later, later));
    return thread;
}

void loop_join(pthread_t thread)
{
    must(!pthread_join(thread, NULL));
}

void loop_arm(struct ibv_cq *cq, int solicited_only)
{
    must(!ibv_req_notify_cq(cq, solicited_only));
}

int loop_get(struct ibv_comp_channel *channel, struct ibv_cq **cq)
{
    struct ibv_cq *got = NULL;
    void *context = NULL;

    if (ibv_get_cq_event(channel, &got, &context))
        return errno;
    must(got && got->channel == channel);
    must(context == got->cq_context);
    ibv_ack_cq_events(got, 1);
    if (cq)
        *cq = got;
    return 0;
}

int loop_poll(struct loop *loop, struct pair *pair)
{
    struct ibv_wc wc;
    int n = ibv_poll_cq(pair->near_cq, 1, &wc);

    must(n >= 0);
    if (n) {
        must(wc.status == IBV_WC_SUCCESS);
        post_receive(loop, pair->near);
    }
    return n;
}

void loop_drain(struct loop *loop, unsigned n)
{
    while (n)
        if (loop_poll(loop, &loop->pair))
            n--;
        else
            sched_yield();
}

void loop_first_waits(struct loop *loop)
{
    pthread_t thread;

    loop_arm(loop->cq, 0);
    thread = loop_send_later(loop, 1, 5);
    must(!loop_get(loop->channel, NULL));
    loop_join(thread);
    loop_drain(loop, 1);
    loop_arm(loop->cq, 0);
    loop_send(loop, 1);
    must(!loop_get(loop->channel, NULL));
    loop_drain(loop, 1);
}

void loop_say_event(struct loop *loop, const char *when)
{
    int flags = fcntl(loop->channel->fd, F_GETFL);
    int error;

    must(flags >= 0);
    must(!fcntl(loop->channel->fd, F_SETFL, flags | O_NONBLOCK));
    error = loop_get(loop->channel, NULL);
    must(!fcntl(loop->channel->fd, F_SETFL, flags));
    printf("%s: %s\n", when, error ? loop_error(error) : "an event");
}

void loop_pause(unsigned milliseconds)
{
    struct timespec left = {milliseconds / 1000, milliseconds % 1000 * 1000000L};

    while (nanosleep(&left, &left) && errno == EINTR)
        ;
}

const char *loop_error(int error)
{
    switch (error) {
    case 0:
        return "ok";
    case EAGAIN:
        return "EAGAIN";
    case EINTR:
        return "EINTR";
    case EIO:
        return "EIO";
    case EBUSY:
        return "EBUSY";
    case EINVAL:
        return "EINVAL";
    case EBADF:
        return "EBADF";
    default:
        return strerror(error);
    }
}
