/* SPDX-License-Identifier: MIT */
/* Signals during the wait: EINTR from a handler without SA_RESTART, and from no other. */
#include "loop.h"

#include <signal.h>

static volatile sig_atomic_t handled;
static pthread_t waiter;

static void on_signal(int number)
{
    (void)number;
    handled++;
    errno = ENOTTY; /* a handler that does not save errno is no excuse */
}

static void handle(int flags)
{
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = flags};

    must(!sigaction(SIGUSR1, &action, NULL));
    handled = 0;
}

static void *interrupts(void *pauses)
{
    for (int i = 0; i < 3; i++) {
        loop_pause((long)pauses);
        must(!pthread_kill(waiter, SIGUSR1));
    }
    return NULL;
}

int main(int argc, char **argv)
{
    struct loop loop;
    pthread_t thread;

    waiter = pthread_self();
    loop_open(&loop, argc, argv);
    loop_arm(loop.cq, 0);

    handle(0);
    must(!pthread_create(&thread, NULL, interrupts, (void *)10L));
    for (int i = 0; i < 3; i++)
        printf("without SA_RESTART: %s\n", loop_error(loop_get(loop.channel, NULL)));
    loop_join(thread);
    printf("handlers run: %d\n", (int)handled);

    handle(SA_RESTART);
    must(!pthread_create(&thread, NULL, interrupts, (void *)10L));
    pthread_t sender = loop_send_later(&loop, 1, 100);
    printf("with SA_RESTART: %s\n", loop_error(loop_get(loop.channel, NULL)));
    loop_join(thread);
    loop_join(sender);
    printf("handlers run: %d\n", (int)handled);
    loop_drain(&loop, 1);

    /* Ignored signals interrupt nothing. */
    must(signal(SIGUSR1, SIG_IGN) != SIG_ERR);
    loop_arm(loop.cq, 0);
    must(!pthread_create(&thread, NULL, interrupts, (void *)10L));
    sender = loop_send_later(&loop, 1, 100);
    printf("ignored: %s\n", loop_error(loop_get(loop.channel, NULL)));
    loop_join(thread);
    loop_join(sender);
    loop_drain(&loop, 1);
    loop_close(&loop);
    return 0;
}
