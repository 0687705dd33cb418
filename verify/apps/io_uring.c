/* SPDX-License-Identifier: MIT */
/* An invisible waiter: a poll request on an io_uring, set up by bare system calls. */
#include "loop.h"

#include <linux/io_uring.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>

struct uring {
    int fd;
    unsigned *sq_tail, *sq_mask, *sq_array, *cq_head, *cq_tail, *cq_mask;
    struct io_uring_sqe *sqes;
    struct io_uring_cqe *cqes;
};

static void set_up(struct uring *uring)
{
    struct io_uring_params params = {0};
    char *sq, *cq;

    uring->fd = syscall(SYS_io_uring_setup, 4, &params);
    if (uring->fd < 0) {
        printf("io_uring is not to be had here: %s\n", strerror(errno));
        exit(77);
    }
    sq = mmap(NULL, params.sq_off.array + params.sq_entries * sizeof(unsigned),
              PROT_READ | PROT_WRITE, MAP_SHARED, uring->fd, IORING_OFF_SQ_RING);
    cq = mmap(NULL, params.cq_off.cqes + params.cq_entries * sizeof(struct io_uring_cqe),
              PROT_READ | PROT_WRITE, MAP_SHARED, uring->fd, IORING_OFF_CQ_RING);
    uring->sqes = mmap(NULL, params.sq_entries * sizeof(struct io_uring_sqe),
                       PROT_READ | PROT_WRITE, MAP_SHARED, uring->fd, IORING_OFF_SQES);
    must(sq != MAP_FAILED && cq != MAP_FAILED && (void *)uring->sqes != MAP_FAILED);
    uring->sq_tail = (unsigned *)(sq + params.sq_off.tail);
    uring->sq_mask = (unsigned *)(sq + params.sq_off.ring_mask);
    uring->sq_array = (unsigned *)(sq + params.sq_off.array);
    uring->cq_head = (unsigned *)(cq + params.cq_off.head);
    uring->cq_tail = (unsigned *)(cq + params.cq_off.tail);
    uring->cq_mask = (unsigned *)(cq + params.cq_off.ring_mask);
    uring->cqes = (struct io_uring_cqe *)(cq + params.cq_off.cqes);
}

static void submit_poll(struct uring *uring, int fd)
{
    unsigned tail = *uring->sq_tail, index = tail & *uring->sq_mask;

    memset(&uring->sqes[index], 0, sizeof uring->sqes[index]);
    uring->sqes[index].opcode = IORING_OP_POLL_ADD;
    uring->sqes[index].fd = fd;
    uring->sqes[index].poll32_events = POLLIN;
    uring->sq_array[index] = index;
    __atomic_store_n(uring->sq_tail, tail + 1, __ATOMIC_RELEASE);
    must(syscall(SYS_io_uring_enter, uring->fd, 1, 0, 0, NULL, 0) == 1);
}

static int await(struct uring *uring)
{
    unsigned head = *uring->cq_head;
    int result;

    while (head == __atomic_load_n(uring->cq_tail, __ATOMIC_ACQUIRE))
        must(syscall(SYS_io_uring_enter, uring->fd, 0, 1, IORING_ENTER_GETEVENTS, NULL, 0) >= 0 ||
             errno == EINTR);
    result = uring->cqes[head & *uring->cq_mask].res;
    __atomic_store_n(uring->cq_head, head + 1, __ATOMIC_RELEASE);
    return result;
}

int main(int argc, char **argv)
{
    struct loop loop;
    struct uring uring;
    pthread_t thread;

    loop_open(&loop, argc, argv);
    set_up(&uring);
    loop_first_waits(&loop);

    for (int i = 0; i < 3; i++) {
        loop_arm(loop.cq, 0);
        submit_poll(&uring, loop.channel->fd);
        loop_send(&loop, 1); /* at once: between the arm and anybody who could have noticed it */
        printf("at once: %s\n", await(&uring) & POLLIN ? "readable" : "not readable");
        must(!loop_get(loop.channel, NULL));
        loop_drain(&loop, 1);

        loop_arm(loop.cq, 0);
        submit_poll(&uring, loop.channel->fd);
        thread = loop_send_later(&loop, 1, 10);
        printf("later: %s\n", await(&uring) & POLLIN ? "readable" : "not readable");
        must(!loop_get(loop.channel, NULL));
        loop_join(thread);
        loop_drain(&loop, 1);
    }
    close(uring.fd);
    loop_close(&loop);
    return 0;
}
