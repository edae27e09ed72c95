/* Kernels that read each row of their input once. */

#include "kernels.h"

#include <math.h>

#include "vectors.h"
#include "work.h"

/* Numbers of one piece: less is not worth a second thread. */
#define PIECE (1 << 15)

static int64_t rows_of_piece(int64_t width)
{
    return width < PIECE ? PIECE / width : 1;
}

static void share_rows(Piece piece, const void *task, int64_t num_rows, int64_t width, int num_threads)
{
    int64_t rows = rows_of_piece(width);
    share_work(piece, task, (num_rows + rows - 1) / rows, num_threads);
}

#define ROWS_OF_PIECE(task, width)                                                                                     \
    int64_t rows = rows_of_piece(width), row = piece * rows;                                                           \
    row < (task)->num_rows && row < (piece + 1) * rows;                                                                \
    row++

INLINE void norm_row(const struct Norm *norm, int64_t row, int x_bf16, int weight_bf16)
{
    int64_t size = norm->size, start = row * size;
    v16 squares = {0};
    for (int64_t i = 0; i < size; i += LANES) {
        v16 x = load(norm->x, start + i, x_bf16);
        squares += x * x;
    }
    float scale = 1.0f / sqrtf(sum(squares) / (float)size + norm->eps);
    for (int64_t i = 0; i < size; i += LANES) {
        v16 x = load(norm->x, start + i, x_bf16) * scale;
        store(norm->out, start + i, x * load(norm->weight, i, weight_bf16), x_bf16);
    }
}

CLONED static void norm_piece(const void *task, int64_t piece)
{
    const struct Norm *norm = task;
    for (ROWS_OF_PIECE(norm, norm->size))
        if (!norm->x_bf16)
            norm_row(norm, row, 0, 0);
        else if (norm->weight_bf16)
            norm_row(norm, row, 1, 1);
        else
            norm_row(norm, row, 1, 0);
}

void rms_norm(const struct Norm *norm, int num_threads)
{
    share_rows(norm_piece, norm, norm->num_rows, norm->size, num_threads);
}

INLINE void gate_row(const struct Gate *gate, int64_t row, int bf16)
{
    int64_t size = gate->size, start = 2 * row * size;
    for (int64_t i = 0; i < size; i += LANES) {
        v16 x = load(gate->x, start + i, bf16);
        v16 y = x / (1.0f + exponential(-x));
        store(gate->out, row * size + i, y * load(gate->x, start + size + i, bf16), bf16);
    }
}

CLONED static void gate_piece(const void *task, int64_t piece)
{
    const struct Gate *gate = task;
    for (ROWS_OF_PIECE(gate, gate->size))
        if (gate->bf16)
            gate_row(gate, row, 1);
        else
            gate_row(gate, row, 0);
}

void silu_mul(const struct Gate *gate, int num_threads)
{
    share_rows(gate_piece, gate, gate->num_rows, gate->size, num_threads);
}

INLINE void turn_row(const struct Turn *turn, int64_t row, int bf16)
{
    int64_t half = turn->dim / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        v16 cos = load(turn->cos, row * turn->dim + i, bf16), sin = load(turn->sin, row * turn->dim + half + i, bf16);
        for (int64_t head = 0; head < turn->num_heads; head++) {
            int64_t at = row * turn->row_stride + head * turn->head_stride + i;
            v16 a = load(turn->x, at, bf16), b = load(turn->x, at + half, bf16);
            store(turn->x, at, a * cos - b * sin, bf16);
            store(turn->x, at + half, b * cos + a * sin, bf16);
        }
    }
}

CLONED static void turn_piece(const void *task, int64_t piece)
{
    const struct Turn *turn = task;
    for (ROWS_OF_PIECE(turn, turn->num_heads * turn->dim))
        if (turn->bf16)
            turn_row(turn, row, 1);
        else
            turn_row(turn, row, 0);
}

void rotate(const struct Turn *turn, int num_threads)
{
    share_rows(turn_piece, turn, turn->num_rows, turn->num_heads * turn->dim, num_threads);
}

INLINE void keep_rows(const struct Keep *keep, int bf16, int cache_bf16)
{
    for (int64_t row = 0; row < keep->num_rows; row++)
        for (int64_t i = 0; i < keep->size; i += LANES) {
            int64_t to = keep->slots[row] * keep->size + i;
            store(keep->k_cache, to, load(keep->k, row * keep->k_stride + i, bf16), cache_bf16);
            store(keep->v_cache, to, load(keep->v, row * keep->v_stride + i, bf16), cache_bf16);
        }
}

CLONED void keep(const struct Keep *keep)
{
    if (keep->bf16)
        keep->cache_bf16 ? keep_rows(keep, 1, 1) : keep_rows(keep, 1, 0);
    else
        keep->cache_bf16 ? keep_rows(keep, 0, 1) : keep_rows(keep, 0, 0);
}
