#define _GNU_SOURCE
#include "work.h"

#include <dlfcn.h>

struct Shared {
    Piece piece;
    const void *task;
    int64_t num_pieces, next;
};

static void take_pieces(void *given)
{
    struct Shared *shared = given;
    int64_t i;
    while ((i = __atomic_fetch_add(&shared->next, 1, __ATOMIC_RELAXED)) < shared->num_pieces)
        shared->piece(shared->task, i);
}

typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);

/* How compiled code asks an OpenMP runtime for threads (libgomp's interface, libiomp has it, too). Threads of our own, or
   of a second runtime, would fight with torch's for the cores, which spin for a while after each of its operations. */
static Parallel parallel(void)
{
    static Parallel found;
    static int looked;
    if (!__atomic_load_n(&looked, __ATOMIC_ACQUIRE)) {
        found = (Parallel)dlsym(RTLD_DEFAULT, "GOMP_parallel");
        __atomic_store_n(&looked, 1, __ATOMIC_RELEASE);
    }
    return found;
}

void share_work(Piece piece, const void *task, int64_t num_pieces, int num_threads)
{
    struct Shared shared = {piece, task, num_pieces, 0};
    if (num_threads > num_pieces)
        num_threads = (int)num_pieces;
    if (num_threads > 1 && parallel())
        parallel()(take_pieces, &shared, (unsigned)num_threads, 0);
    else
        take_pieces(&shared);
}
