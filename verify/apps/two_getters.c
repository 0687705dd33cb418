/* SPDX-License-Identifier: MIT */
/* Two threads wait on one channel: one event each, none for both. */
#include "loop.h"

static struct loop loop;
static int returned;

static void *gets(void *arg)
{
    (void)arg;
    must(!loop_get(loop.channel, NULL));
    __atomic_add_fetch(&returned, 1, __ATOMIC_SEQ_CST);
    return NULL;
}

int main(int argc, char **argv)
{
    pthread_t threads[2];

    loop_open(&loop, argc, argv);
    for (int round = 0; round < 20; round++) {
        returned = 0;
        loop_arm(loop.cq, 0);
        for (int i = 0; i < 2; i++)
            must(!pthread_create(&threads[i], NULL, gets, NULL));
        if (round % 5 == 0)
            loop_pause(10);
        loop_send(&loop, 1);
        loop_drain(&loop, 1);
        while (!__atomic_load_n(&returned, __ATOMIC_SEQ_CST))
            loop_pause(1);
        loop_pause(5);
        must(__atomic_load_n(&returned, __ATOMIC_SEQ_CST) == 1);
        loop_arm(loop.cq, 0);
        loop_send(&loop, 1);
        loop_drain(&loop, 1);
        for (int i = 0; i < 2; i++)
            loop_join(threads[i]);
    }
    printf("each event woke one thread\n");
    loop_close(&loop);
    return 0;
}
