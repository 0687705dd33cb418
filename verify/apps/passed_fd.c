/* SPDX-License-Identifier: MIT */
/* An invisible waiter: the channel's descriptor goes over a unix socket to a process that polls it. */
#include "loop.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>

static void transfer(int socket, int *fd, int send)
{
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(sizeof(int))];
    } control = {0};
    char byte = 0;
    struct iovec data = {&byte, 1};
    struct msghdr message = {.msg_iov = &data,
                             .msg_iovlen = 1,
                             .msg_control = &control,
                             .msg_controllen = sizeof control};
    struct cmsghdr *header;

    if (send) {
        header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof *fd);
        memcpy(CMSG_DATA(header), fd, sizeof *fd);
        must(sendmsg(socket, &message, 0) == 1);
    } else {
        must(recvmsg(socket, &message, 0) == 1);
        must(header = CMSG_FIRSTHDR(&message));
        memcpy(fd, CMSG_DATA(header), sizeof *fd);
    }
}

/* Polls what it is sent, and says "ready" by a byte; ends when the socket does. */
static int watch(int socket)
{
    struct pollfd pollfd = {.events = POLLIN};
    char byte;

    transfer(socket, &pollfd.fd, 0);
    while (read(socket, &byte, 1) == 1) {
        byte = poll(&pollfd, 1, 5000) == 1 ? 'r' : 't';
        must(write(socket, &byte, 1) == 1);
    }
    return 0;
}

int main(int argc, char **argv)
{
    struct loop loop;
    pthread_t thread;
    int sockets[2], status;
    char byte = 0;
    pid_t child;

    /* The watcher is there before the device is opened: it inherits nothing. */
    must(!socketpair(AF_UNIX, SOCK_STREAM, 0, sockets));
    must((child = fork()) >= 0);
    if (!child) {
        close(sockets[0]);
        _exit(watch(sockets[1]));
    }
    close(sockets[1]);
    loop_open(&loop, argc, argv);
    loop_first_waits(&loop);

    transfer(sockets[0], &loop.channel->fd, 1);
    for (int pause = 0; pause <= 20; pause += 10) {
        loop_arm(loop.cq, 0);
        must(write(sockets[0], &byte, 1) == 1);
        thread = loop_send_later(&loop, 1, pause);
        must(read(sockets[0], &byte, 1) == 1);
        printf("the other process: %s\n", byte == 'r' ? "ready" : "timeout");
        loop_join(thread);
        printf("get: %s\n", loop_error(loop_get(loop.channel, NULL)));
        loop_drain(&loop, 1);
    }
    close(sockets[0]);
    must(waitpid(child, &status, 0) == child && !status);
    loop_close(&loop);
    return 0;
}
