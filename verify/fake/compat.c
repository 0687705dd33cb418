/* SPDX-License-Identifier: MIT */
/*
 * Functions of version IBVERBS_1.0 that have a successor in IBVERBS_1.1 with other structs. Nothing
 * of the fake calls them; a preload library that exports these names without a version captures
 * their callers, and then FAKE_COMPAT stays 0. They touch none of their arguments.
 */
#include <errno.h>

#include "state.h"

int compat_get_cq_event(void *channel, void **cq, void **cq_context);
void compat_ack_cq_events(void *cq, unsigned int n);
void *compat_create_cq(void *context, int cqe, void *cq_context, void *channel, int comp_vector);
int compat_destroy_cq(void *cq);
void *compat_open_device(void *device);
int compat_close_device(void *context);

__asm__(".symver compat_get_cq_event, ibv_get_cq_event@IBVERBS_1.0");
__asm__(".symver compat_ack_cq_events, ibv_ack_cq_events@IBVERBS_1.0");
__asm__(".symver compat_create_cq, ibv_create_cq@IBVERBS_1.0");
__asm__(".symver compat_destroy_cq, ibv_destroy_cq@IBVERBS_1.0");
__asm__(".symver compat_open_device, ibv_open_device@IBVERBS_1.0");
__asm__(".symver compat_close_device, ibv_close_device@IBVERBS_1.0");

int compat_get_cq_event(void *channel, void **cq, void **cq_context)
{
    (void)channel, (void)cq, (void)cq_context;
    fake_count(FAKE_COMPAT);
    errno = ENOSYS;
    return -1;
}

void compat_ack_cq_events(void *cq, unsigned int n)
{
    (void)cq, (void)n;
    fake_count(FAKE_COMPAT);
}

void *compat_create_cq(void *context, int cqe, void *cq_context, void *channel, int comp_vector)
{
    (void)context, (void)cqe, (void)cq_context, (void)channel, (void)comp_vector;
    fake_count(FAKE_COMPAT);
    errno = ENOSYS;
    return 0;
}

int compat_destroy_cq(void *cq)
{
    (void)cq;
    fake_count(FAKE_COMPAT);
    return ENOSYS;
}

void *compat_open_device(void *device)
{
    (void)device;
    fake_count(FAKE_COMPAT);
    errno = ENOSYS;
    return 0;
}

int compat_close_device(void *context)
{
    (void)context;
    fake_count(FAKE_COMPAT);
    return -1;
}
