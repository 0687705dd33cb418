/* SPDX-License-Identifier: MIT */
/* Devices, contexts and what a program asks before it has a queue: PDs, MRs, ports, addresses. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "state.h"

SUCCESSOR(ibv_open_device);
SUCCESSOR(ibv_close_device);

static struct fake_device devices[FAKE_KINDS] = {
    [FAKE_PLAIN] = {.kind = FAKE_PLAIN, .device = {.name = "fake0", .dev_name = "uverbs_fake0"}},
    [FAKE_EAGER] = {.kind = FAKE_EAGER, .device = {.name = "fake_eager", .dev_name = "uverbs_fake1"}},
    [FAKE_SN] = {.kind = FAKE_SN, .device = {.name = "fake_sn", .dev_name = "uverbs_fake2"}},
};

struct ibv_device **ibv_get_device_list(int *num)
{
    struct ibv_device **list = calloc(FAKE_KINDS + 1, sizeof *list);

    if (!list)
        return NULL;
    for (int i = 0; i < FAKE_KINDS; i++) {
        devices[i].device.node_type = IBV_NODE_CA;
        devices[i].device.transport_type = IBV_TRANSPORT_IB;
        list[i] = &devices[i].device;
    }
    if (num)
        *num = FAKE_KINDS;
    return list;
}

void ibv_free_device_list(struct ibv_device **list)
{
    free(list);
}

const char *ibv_get_device_name(struct ibv_device *device)
{
    return device->name;
}

__be64 ibv_get_device_guid(struct ibv_device *device)
{
    return container(device, struct fake_device, device)->kind + 1;
}

static int query_port_ex(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr,
                         size_t size)
{
    struct ibv_port_attr full = {
        .state = IBV_PORT_ACTIVE,
        .max_mtu = IBV_MTU_4096,
        .active_mtu = IBV_MTU_4096,
        .gid_tbl_len = 1,
        .pkey_tbl_len = 1,
        .lid = 1,
        .sm_lid = 1,
        .max_msg_sz = 1u << 30,
        .link_layer = IBV_LINK_LAYER_INFINIBAND,
    };

    (void)context;
    if (port != 1)
        return EINVAL;
    memcpy(attr, &full, size < sizeof full ? size : sizeof full);
    return 0;
}

/* The old struct lacks the fields after port_cap_flags2. */
int ibv_query_port(struct ibv_context *context, uint8_t port, struct _compat_ibv_port_attr *attr)
{
    return query_port_ex(context, port, (struct ibv_port_attr *)attr,
                         __builtin_offsetof(struct ibv_port_attr, port_cap_flags2));
}

int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attr)
{
    (void)context;
    *attr = (struct ibv_device_attr){
        .fw_ver = "0",
        .max_mr_size = ~0ull,
        .max_qp = 1024,
        .max_qp_wr = 16384,
        .max_sge = 8,
        .max_cq = 1024,
        .max_cqe = 1 << 20,
        .max_mr = 1024,
        .max_pd = 1024,
        .phys_port_cnt = 1,
    };
    return 0;
}

int ibv_query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid)
{
    (void)context;
    if (port != 1 || index != 0) {
        errno = EINVAL;
        return -1;
    }
    memset(gid, 0, sizeof *gid);
    gid->raw[0] = 0xfe;
    gid->raw[1] = 0x80;
    gid->raw[15] = 1;
    return 0;
}

struct ibv_context *ibv_open_device(struct ibv_device *device)
{
    struct fake_context *fake = calloc(1, sizeof *fake);
    struct ibv_context *context;

    if (!fake)
        return NULL;
    fake->kind = container(device, struct fake_device, device)->kind;
    fake->verbs.sz = sizeof fake->verbs;
    fake->verbs.query_port = query_port_ex;
    fake->verbs.create_cq_ex = fake_create_cq_ex;
    context = &fake->verbs.context;
    context->device = device;
    context->abi_compat = __VERBS_ABI_IS_EXTENDED;
    context->cmd_fd = -1;
    context->async_fd = -1;
    context->num_comp_vectors = 4;
    pthread_mutex_init(&context->mutex, NULL);
    context->ops.poll_cq = fake_poll_cq;
    context->ops.req_notify_cq = fake_req_notify_cq;
    context->ops.post_send = fake_post_send;
    context->ops.post_recv = fake_post_recv;
    return context;
}

int ibv_close_device(struct ibv_context *context)
{
    free(container(context, struct fake_context, verbs.context));
    return 0;
}

struct ibv_pd *ibv_alloc_pd(struct ibv_context *context)
{
    struct ibv_pd *pd = calloc(1, sizeof *pd);

    if (pd)
        pd->context = context;
    return pd;
}

int ibv_dealloc_pd(struct ibv_pd *pd)
{
    free(pd);
    return 0;
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access)
{
    struct ibv_mr *mr = calloc(1, sizeof *mr);

    (void)access;
    if (!mr)
        return NULL;
    *mr = (struct ibv_mr){
        .context = pd->context, .pd = pd, .addr = addr, .length = length, .lkey = 1, .rkey = 1};
    return mr;
}

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova,
                                unsigned int access)
{
    if (iova != (uintptr_t)addr) {
        errno = EOPNOTSUPP;
        return NULL;
    }
    return ibv_reg_mr(pd, addr, length, access);
}

int ibv_dereg_mr(struct ibv_mr *mr)
{
    free(mr);
    return 0;
}

int ibv_fork_init(void)
{
    return 0;
}

const char *ibv_wc_status_str(enum ibv_wc_status status)
{
    switch (status) {
    case IBV_WC_SUCCESS:
        return "success";
    case IBV_WC_WR_FLUSH_ERR:
        return "Work Request Flushed Error";
    default:
        return "error";
    }
}
