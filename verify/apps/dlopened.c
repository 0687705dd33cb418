/* SPDX-License-Identifier: MIT */
/*
 * Verbs looked up in a handle of dlopen("libibverbs.so.1"), as NCCL, UCX and brpc do. Not linked to
 * libibverbs at all; only the inline calls of verbs.h are used directly.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *handle;

static void *look_up(const char *name, const char *version)
{
    void *function = version ? dlvsym(handle, name, version) : dlsym(handle, name);

    if (!function) {
        printf("no %s\n", name);
        exit(1);
    }
    return function;
}

#define LOOK_UP(name, version) __typeof__(&name) dl_##name = look_up(#name, version)

#define must(condition)                                                                            \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            printf("%s:%d: failed: %s\n", __FILE__, __LINE__, #condition);                         \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static void run(const char *device, const char *version)
{
    LOOK_UP(ibv_get_device_list, version);
    LOOK_UP(ibv_free_device_list, version);
    LOOK_UP(ibv_get_device_name, version);
    LOOK_UP(ibv_open_device, version);
    LOOK_UP(ibv_close_device, version);
    LOOK_UP(ibv_alloc_pd, version);
    LOOK_UP(ibv_dealloc_pd, version);
    LOOK_UP(ibv_create_cq, version);
    LOOK_UP(ibv_destroy_cq, version);
    LOOK_UP(ibv_create_qp, version);
    LOOK_UP(ibv_modify_qp, version);
    LOOK_UP(ibv_destroy_qp, version);
    LOOK_UP(ibv_get_cq_event, version);
    LOOK_UP(ibv_ack_cq_events, version);
    LOOK_UP(ibv_create_comp_channel, version ? "IBVERBS_1.0" : NULL);
    LOOK_UP(ibv_destroy_comp_channel, version ? "IBVERBS_1.0" : NULL);
    struct ibv_device **list = dl_ibv_get_device_list(NULL), **found = list;
    struct ibv_context *context;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq, *got;
    struct ibv_qp *qp;
    struct ibv_pd *pd;
    struct ibv_wc wc;
    void *cq_context;
    int events = 0;

    must(list);
    while (*found && strcmp(dl_ibv_get_device_name(*found), device))
        found++;
    must(*found);
    must(context = dl_ibv_open_device(*found));
    dl_ibv_free_device_list(list);
    must(pd = dl_ibv_alloc_pd(context));
    must(channel = dl_ibv_create_comp_channel(context));
    must(cq = dl_ibv_create_cq(context, 16, &events, channel, 0));
    struct ibv_qp_init_attr init = {
        .send_cq = cq,
        .recv_cq = cq,
        .qp_type = IBV_QPT_RC,
        .cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1},
    };
    must(qp = dl_ibv_create_qp(pd, &init));
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1};
    must(!dl_ibv_modify_qp(qp, &attr,
                           IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
    attr.qp_state = IBV_QPS_ERR;
    must(!dl_ibv_modify_qp(qp, &attr, IBV_QP_STATE));
    /* The simplest source of completions: what is posted to a QP in the error state is flushed. */
    for (int i = 0; i < 50; i++) {
        struct ibv_send_wr wr = {.opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED}, *bad;

        must(!ibv_req_notify_cq(cq, 0));
        must(!ibv_post_send(qp, &wr, &bad));
        must(!dl_ibv_get_cq_event(channel, &got, &cq_context));
        must(got == cq && cq_context == &events);
        must(ibv_poll_cq(cq, 1, &wc) == 1 && wc.status == IBV_WC_WR_FLUSH_ERR);
        events++;
    }
    dl_ibv_ack_cq_events(cq, events);
    printf("%s: %d events\n", version ? "dlvsym" : "dlsym", events);
    must(!dl_ibv_destroy_qp(qp));
    must(!dl_ibv_destroy_cq(cq));
    must(!dl_ibv_destroy_comp_channel(channel));
    must(!dl_ibv_dealloc_pd(pd));
    must(!dl_ibv_close_device(context));
}

int main(int argc, char **argv)
{
    if (argc != 2) {
        printf("usage: %s DEVICE\n", argv[0]);
        return 2;
    }
    must(handle = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL));
    run(argv[1], NULL);
    run(argv[1], "IBVERBS_1.1");
    /* A name that is not there is not there. */
    printf("no_such_verb: %s\n", dlsym(handle, "ibv_no_such_verb") ? "found" : "not found");
    return 0;
}
