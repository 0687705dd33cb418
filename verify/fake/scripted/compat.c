/* SPDX-License-Identifier: MIT */
/*
 * A program of the old days, bound to the IBVERBS_1.0 functions: they must reach the library, since
 * their structs are not those that IBVERBS_1.1 takes.
 */
#include <dlfcn.h>

#include "script.h"

int old_get_cq_event(void *channel, void **cq, void **cq_context);
void *old_create_cq(void *context, int cqe, void *cq_context, void *channel, int comp_vector);
int old_destroy_cq(void *cq);
int old_close_device(void *context);

__asm__(".symver old_get_cq_event, ibv_get_cq_event@IBVERBS_1.0");
__asm__(".symver old_create_cq, ibv_create_cq@IBVERBS_1.0");
__asm__(".symver old_destroy_cq, ibv_destroy_cq@IBVERBS_1.0");
__asm__(".symver old_close_device, ibv_close_device@IBVERBS_1.0");

int main(int argc, char **argv)
{
    char old_struct[1024] = {0};
    void *out;

    script_open(argc, argv);
    printf("get_cq_event: %s\n", old_get_cq_event(old_struct, &out, &out) ? "the old one" : "?");
    printf("create_cq: %s\n",
           old_create_cq(old_struct, 1, NULL, old_struct, 0) ? "?" : "the old one");
    printf("destroy_cq: %s\n", old_destroy_cq(old_struct) == ENOSYS ? "the old one" : "?");
    printf("close_device: %s\n", old_close_device(old_struct) == -1 ? "the old one" : "?");
    printf("%u calls reached the library's old functions\n", fake_calls(FAKE_COMPAT));
    return 0;
}
