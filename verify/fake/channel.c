/* SPDX-License-Identifier: MIT */
/*
 * Completion channels: a pipe of 8-byte records, each the address of the CQ that fired, which is
 * what a uverbs descriptor delivers to libibverbs.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "state.h"

SUCCESSOR(ibv_get_cq_event);
SUCCESSOR(ibv_ack_cq_events);
SUCCESSOR(ibv_destroy_cq);

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context)
{
    struct fake_channel *channel = calloc(1, sizeof *channel);
    int fds[2];

    if (!channel || pipe2(fds, O_CLOEXEC)) {
        free(channel);
        return NULL;
    }
    channel->channel.context = context;
    channel->channel.fd = fds[0];
    /* Out of the way: an application's descriptors have the numbers that they would have. */
    channel->write_fd = fcntl(fds[1], F_DUPFD_CLOEXEC, 500);
    close(fds[1]);
    return &channel->channel;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *ibv)
{
    struct fake_channel *channel = container(ibv, struct fake_channel, channel);
    int rc = 0;

    pthread_mutex_lock(&ibv->context->mutex);
    if (ibv->refcnt)
        rc = EBUSY;
    pthread_mutex_unlock(&ibv->context->mutex);
    if (rc)
        return rc;
    /*
     * The writing end stays open for good: a thread that still reads would see the end of the pipe,
     * where a uverbs descriptor leaves it blocked.
     */
    close(ibv->fd);
    free(channel);
    return 0;
}

/* Raw calls in here: write and read of libc are cancellation points, and the lock is held. */
void fake_fire(struct fake_cq *cq)
{
    struct fake_channel *channel;
    uint64_t record = (uintptr_t)cq;

    cq->arm = FAKE_ARM_NONE;
    cq->done_sn = cq->arm_sn + 1;
    if (!cq->cq.channel)
        return;
    channel = container(cq->cq.channel, struct fake_channel, channel);
    if (syscall(SYS_write, channel->write_fd, &record, sizeof record) == sizeof record)
        cq->fired++;
}

int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **cq_context)
{
    uint64_t record;
    ssize_t got;

    fake_count(FAKE_GET);
    fake_pass(FAKE_GET_BEFORE, NULL);
    got = read(channel->fd, &record, sizeof record);
    if (got != sizeof record) {
        if (got == 0)
            errno = EIO;
        return -1;
    }
    *cq = (struct ibv_cq *)(uintptr_t)record;
    *cq_context = (*cq)->cq_context;
    fake_pass(FAKE_GET_AFTER, *cq);
    fake_cq_event(*cq);
    return 0;
}

void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int n)
{
    fake_count(FAKE_ACK);
    pthread_mutex_lock(&cq->mutex);
    cq->comp_events_completed += n;
    pthread_cond_signal(&cq->cond);
    pthread_mutex_unlock(&cq->mutex);
}

void fake_unplug(struct ibv_comp_channel *ibv)
{
    struct fake_channel *channel = container(ibv, struct fake_channel, channel);

    pthread_mutex_lock(&fake_lock);
    close(channel->write_fd);
    channel->write_fd = -1;
    pthread_mutex_unlock(&fake_lock);
}

unsigned fake_fired(struct ibv_cq *cq)
{
    return container(cq, struct fake_cq, cq)->fired;
}

/*
 * A CQ goes: its unread records are dropped, everybody else's stay in their order. Returns how many
 * were dropped; with the lock held, so that nobody writes meanwhile.
 */
static unsigned drop_records(struct fake_channel *channel, struct fake_cq *cq)
{
    struct pollfd readable = {.fd = channel->channel.fd, .events = POLLIN};
    uint64_t kept[8192], record;
    unsigned n = 0, dropped = 0;

    while (n < 8192 && syscall(SYS_poll, &readable, 1, 0) == 1 && readable.revents & POLLIN &&
           syscall(SYS_read, readable.fd, &record, sizeof record) == sizeof record) {
        if (record == (uintptr_t)cq)
            dropped++;
        else
            kept[n++] = record;
    }
    for (unsigned i = 0; i < n; i++)
        syscall(SYS_write, channel->write_fd, &kept[i], sizeof kept[i]);
    return dropped;
}

int ibv_destroy_cq(struct ibv_cq *ibv)
{
    struct fake_cq *cq = container(ibv, struct fake_cq, cq);
    struct ibv_comp_channel *channel = ibv->channel;
    unsigned reported;

    fake_count(FAKE_DESTROY_CQ);
    pthread_mutex_lock(&fake_lock);
    if (cq->qps) {
        pthread_mutex_unlock(&fake_lock);
        return EBUSY;
    }
    cq->arm = FAKE_ARM_NONE;
    reported = cq->fired;
    if (channel)
        reported -= drop_records(container(channel, struct fake_channel, channel), cq);
    pthread_mutex_unlock(&fake_lock);

    if (channel) {
        pthread_mutex_lock(&ibv->context->mutex);
        channel->refcnt--;
        pthread_mutex_unlock(&ibv->context->mutex);
    }
    pthread_mutex_lock(&ibv->mutex);
    while (ibv->comp_events_completed != reported)
        pthread_cond_wait(&ibv->cond, &ibv->mutex);
    pthread_mutex_unlock(&ibv->mutex);
    free(cq->ring);
    free(cq);
    return 0;
}
