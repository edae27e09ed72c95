/* A kernel's work in pieces, and the threads that share it. */

#ifndef KVFERRY_WORK_H
#define KVFERRY_WORK_H

#include <stdint.h>

typedef void (*Piece)(const void *task, int64_t i);

/* Call piece(task, i) for each i in [0, num_pieces), on up to num_threads of torch's own threads. What a piece computes
   does not depend on the thread that it falls to. */
void share_work(Piece piece, const void *task, int64_t num_pieces, int num_threads);

#endif
