/* copy_rows: many short pieces of memory at the machine's rate; workers/kv_transfer/rows.py says what it does.

   A copy larger than the caches gains from three things that memcpy, called for one row after another, does not do:
   stores that do not first read what they replace, two rows at once, and fetches that run ahead across the end of a
   row, where the processor's own stop. */

#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <emmintrin.h>
#define AHEAD 512
#define STRIDE 128

static inline void fetch_ahead(const char *row, const char *next, Py_ssize_t at, Py_ssize_t row_bytes)
{
    const char *from = at + AHEAD < row_bytes ? row + at + AHEAD : next + (at + AHEAD - row_bytes);
    _mm_prefetch(from, _MM_HINT_T0);
    _mm_prefetch(from + 64, _MM_HINT_T0);
}

static inline void stream_stride(char *to, const char *from)
{
    for (int at = 0; at < STRIDE; at += 16)
        _mm_stream_si128((__m128i *)(to + at), _mm_loadu_si128((const __m128i *)(from + at)));
}

static void stream_rows(char *target, const int64_t *to, const char *source, const int64_t *from, Py_ssize_t num_rows,
                        Py_ssize_t row_bytes)
{
    Py_ssize_t half = num_rows / 2;
    for (Py_ssize_t i = 0; i < half; i++) {
        char *to_1 = target + to[i] * row_bytes, *to_2 = target + to[i + half] * row_bytes;
        const char *from_1 = source + from[i] * row_bytes, *from_2 = source + from[i + half] * row_bytes;
        Py_ssize_t next = i + 1 < half ? i + 1 : i;
        const char *next_1 = source + from[next] * row_bytes, *next_2 = source + from[next + half] * row_bytes;
        for (Py_ssize_t at = 0; at < row_bytes; at += STRIDE) {
            fetch_ahead(from_1, next_1, at, row_bytes);
            fetch_ahead(from_2, next_2, at, row_bytes);
            stream_stride(to_1 + at, from_1 + at);
            stream_stride(to_2 + at, from_2 + at);
        }
    }
    _mm_sfence();
    if (num_rows % 2)
        memcpy(target + to[num_rows - 1] * row_bytes, source + from[num_rows - 1] * row_bytes, row_bytes);
}

static int can_stream(const char *target, Py_ssize_t row_bytes)
{
    return row_bytes >= AHEAD && row_bytes % STRIDE == 0 && (uintptr_t)target % 16 == 0;
}
#else
static int can_stream(const char *target, Py_ssize_t row_bytes) { return 0; }
static void stream_rows(char *target, const int64_t *to, const char *source, const int64_t *from, Py_ssize_t num_rows,
                        Py_ssize_t row_bytes) {}
#endif

static int rows_inside(const Py_buffer *rows, const Py_buffer *memory, Py_ssize_t row_bytes)
{
    const int64_t *row = rows->buf;
    int64_t limit = memory->len / row_bytes;
    for (Py_ssize_t i = 0; i < rows->len / (Py_ssize_t)sizeof(int64_t); i++)
        if (row[i] < 0 || row[i] >= limit) {
            PyErr_Format(PyExc_IndexError, "row %lld is not among the %lld that there are", (long long)row[i],
                         (long long)limit);
            return 0;
        }
    return 1;
}

static int copy_checked(Py_buffer *target, Py_buffer *to, Py_buffer *source, Py_buffer *from, Py_ssize_t row_bytes)
{
    if (row_bytes <= 0 || to->len != from->len || to->len % sizeof(int64_t)) {
        PyErr_SetString(PyExc_ValueError, "rows of at least one byte, and as many to as from, are wanted");
        return 0;
    }
    if (!rows_inside(to, target, row_bytes) || !rows_inside(from, source, row_bytes))
        return 0;
    Py_ssize_t num_rows = to->len / (Py_ssize_t)sizeof(int64_t);
    const int64_t *to_row = to->buf, *from_row = from->buf;
    Py_BEGIN_ALLOW_THREADS
    if (can_stream(target->buf, row_bytes))
        stream_rows(target->buf, to_row, source->buf, from_row, num_rows, row_bytes);
    else
        for (Py_ssize_t i = 0; i < num_rows; i++)
            memcpy((char *)target->buf + to_row[i] * row_bytes, (const char *)source->buf + from_row[i] * row_bytes,
                   row_bytes);
    Py_END_ALLOW_THREADS
    return 1;
}

static PyObject *copy_rows(PyObject *module, PyObject *args)
{
    Py_buffer target, to, source, from;
    Py_ssize_t row_bytes;
    if (!PyArg_ParseTuple(args, "w*y*y*y*n", &target, &to, &source, &from, &row_bytes))
        return NULL;
    int copied = copy_checked(&target, &to, &source, &from, row_bytes);
    PyBuffer_Release(&target);
    PyBuffer_Release(&to);
    PyBuffer_Release(&source);
    PyBuffer_Release(&from);
    return copied ? Py_NewRef(Py_None) : NULL;
}

static PyMethodDef methods[] = {
    {"copy_rows", copy_rows, METH_VARARGS, "copy_rows(target, to, source, from, row_bytes)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_rows", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__rows(void) { return PyModule_Create(&module); }
