/* SPDX-License-Identifier: MIT */
/* Signals during the wait: EINTR from a handler without SA_RESTART, and from no other. */
#include "loop.h"

#include <signal.h>

static struct loop loop;
static volatile sig_atomic_t handled;
static int stop;
static pthread_t waiter;

static void on_signal(int number)
{
    (void)number;
    handled++;
    errno = ENOTTY; /* a handler that does not save errno is no excuse */
}

static void handle(void (*handler)(int), int flags)
{
    struct sigaction action = {.sa_handler = handler, .sa_flags = flags};

    must(!sigaction(SIGUSR1, &action, NULL));
    handled = 0;
    __atomic_store_n(&stop, 0, __ATOMIC_SEQ_CST);
}

/* A signal each 10 ms, so that each wait meets one wherever it has got to. */
static void *interrupts(void *arg)
{
    (void)arg;
    while (!__atomic_load_n(&stop, __ATOMIC_SEQ_CST)) {
        loop_pause(10);
        must(!pthread_kill(waiter, SIGUSR1));
    }
    return NULL;
}

/* The message comes when the wait has been interrupted three times. */
static void *sends(void *arg)
{
    (void)arg;
    while (handled < 3)
        loop_pause(5);
    loop_send(&loop, 1);
    return NULL;
}

static void stop_thread(pthread_t thread)
{
    __atomic_store_n(&stop, 1, __ATOMIC_SEQ_CST);
    loop_join(thread);
}

int main(int argc, char **argv)
{
    pthread_t thread, sender;

    waiter = pthread_self();
    loop_open(&loop, argc, argv);
    loop_arm(loop.cq, 0);

    handle(on_signal, 0);
    must(!pthread_create(&thread, NULL, interrupts, NULL));
    for (int i = 0; i < 3; i++)
        printf("without SA_RESTART: %s\n", loop_error(loop_get(loop.channel, NULL)));
    stop_thread(thread);

    handle(on_signal, SA_RESTART);
    must(!pthread_create(&thread, NULL, interrupts, NULL));
    must(!pthread_create(&sender, NULL, sends, NULL));
    printf("with SA_RESTART: %s\n", loop_error(loop_get(loop.channel, NULL)));
    stop_thread(thread);
    loop_join(sender);
    loop_drain(&loop, 1);

    /* Ignored signals interrupt nothing. */
    handle(SIG_IGN, 0);
    loop_arm(loop.cq, 0);
    must(!pthread_create(&thread, NULL, interrupts, NULL));
    sender = loop_send_later(&loop, 1, 60);
    printf("ignored: %s\n", loop_error(loop_get(loop.channel, NULL)));
    stop_thread(thread);
    loop_join(sender);
    loop_drain(&loop, 1);

    /* Blocked ones neither; their handler runs when they are let in. */
    sigset_t set, before;
    handle(on_signal, 0);
    must(!sigemptyset(&set) && !sigaddset(&set, SIGUSR1));
    must(!pthread_sigmask(SIG_BLOCK, &set, &before));
    loop_arm(loop.cq, 0);
    must(!pthread_kill(waiter, SIGUSR1));
    sender = loop_send_later(&loop, 1, 20);
    printf("blocked: %s", loop_error(loop_get(loop.channel, NULL)));
    printf(", %s so far\n", handled ? "handled" : "not handled");
    must(!pthread_sigmask(SIG_SETMASK, &before, NULL));
    printf("let in: %s\n", handled ? "handled" : "not handled");
    loop_join(sender);
    loop_drain(&loop, 1);
    loop_arm(loop.cq, 0);
    loop_send(&loop, 1);
    printf("afterwards: %s\n", loop_error(loop_get(loop.channel, NULL)));
    loop_drain(&loop, 1);
    loop_close(&loop);
    return 0;
}
