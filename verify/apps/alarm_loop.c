/* SPDX-License-Identifier: MIT */
/* A timer that ticks every few milliseconds while events are awaited, as qperf's does. */
#define _GNU_SOURCE
#include "loop.h"

#include <signal.h>
#include <sys/time.h>

static volatile sig_atomic_t ticks;

static void on_tick(int number)
{
    (void)number;
    ticks++;
}

int main(int argc, char **argv)
{
    struct loop loop;
    struct sigaction action = {.sa_handler = on_tick};
    struct itimerval every = {{0, 2000}, {0, 2000}}, never = {{0, 0}, {0, 0}};
    int events = 0, interrupted = 0, error;

    loop_open(&loop, argc, argv);
    must(!sigaction(SIGALRM, &action, NULL));
    must(!setitimer(ITIMER_REAL, &every, NULL));
    for (int i = 0; i < 20; i++) {
        loop_arm(loop.cq, 0);
        pthread_t thread = loop_send_later(&loop, 1, i % 2 ? 10 : 0);
        if (i % 2 == 0)
            while (pthread_tryjoin_np(thread, NULL))
                loop_pause(1); /* its message is there before the wait begins */
        while ((error = loop_get(loop.channel, NULL))) {
            must(error == EINTR);
            interrupted++;
        }
        events++;
        while (!loop_poll(&loop, &loop.pair))
            ;
        while (i % 2 && pthread_tryjoin_np(thread, NULL))
            loop_pause(1);
    }
    must(!setitimer(ITIMER_REAL, &never, NULL));
    printf("%d events, %s\n", events, interrupted ? "interrupted on the way" : "never interrupted");
    loop_close(&loop);
    return 0;
}
