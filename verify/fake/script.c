/* SPDX-License-Identifier: MIT */
/* The script: hooks at points of the provider, counters of calls, failures on demand. */
#include <stdatomic.h>

#include "state.h"

static struct {
    unsigned left; /* passes until it runs; 0: none is set */
    fake_hook *hook;
    void *arg;
} hooks[FAKE_POINTS];

static atomic_uint calls[FAKE_CALLS];

int fake_create_qp_error, fake_solicited_refusal;

void fake_at(enum fake_point point, unsigned nth, fake_hook *hook, void *arg)
{
    pthread_mutex_lock(&fake_lock);
    hooks[point].left = hook ? nth : 0;
    hooks[point].hook = hook;
    hooks[point].arg = arg;
    pthread_mutex_unlock(&fake_lock);
}

void fake_pass(enum fake_point point, struct ibv_cq *cq)
{
    fake_hook *hook = NULL;
    void *arg = NULL;

    pthread_mutex_lock(&fake_lock);
    if (hooks[point].left && --hooks[point].left == 0) {
        hook = hooks[point].hook;
        arg = hooks[point].arg;
    }
    pthread_mutex_unlock(&fake_lock);
    if (hook)
        hook(cq, arg);
}

void fake_count(enum fake_call call)
{
    atomic_fetch_add(&calls[call], 1);
}

unsigned fake_calls(enum fake_call call)
{
    return atomic_load(&calls[call]);
}

void fake_fail_create_qp(int error)
{
    pthread_mutex_lock(&fake_lock);
    fake_create_qp_error = error;
    pthread_mutex_unlock(&fake_lock);
}

void fake_refuse_solicited(int value)
{
    pthread_mutex_lock(&fake_lock);
    fake_solicited_refusal = value;
    pthread_mutex_unlock(&fake_lock);
}
