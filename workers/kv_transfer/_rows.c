/* copy_rows: many short pieces of memory at the machine's rate; workers/kv_transfer/rows.py says what it does.

   A copy larger than the caches gains from three things that memcpy, called for one row after another, does not do:
   several rows at once, fetches that run ahead across the end of a row, where the processor's own stop, and stores
   that do not first read what they replace. */

#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <emmintrin.h>
#define WAYS 4
#define AHEAD 512
#define STRIDE 128

static inline void copy_stride(char *to, const char *from, int stream)
{
    for (int at = 0; at < STRIDE; at += 16) {
        __m128i piece = _mm_loadu_si128((const __m128i *)(from + at));
        if (stream)
            _mm_stream_si128((__m128i *)(to + at), piece);
        else
            _mm_store_si128((__m128i *)(to + at), piece);
    }
}

static inline void copy_side_by_side(char *target, const int64_t *to, const char *source, const int64_t *from,
                                     Py_ssize_t num_rows, Py_ssize_t row_bytes, int stream)
{
    Py_ssize_t num_each = num_rows / WAYS;
    char *there[WAYS];
    const char *here[WAYS], *next[WAYS];
    for (Py_ssize_t i = 0; i < num_each; i++) {
        for (int way = 0; way < WAYS; way++) {
            Py_ssize_t row = i + way * num_each;
            there[way] = target + to[row] * row_bytes;
            here[way] = source + from[row] * row_bytes;
            next[way] = source + from[i + 1 < num_each ? row + 1 : row] * row_bytes;
        }
        for (Py_ssize_t at = 0; at < row_bytes; at += STRIDE)
            for (int way = 0; way < WAYS; way++) {
                Py_ssize_t beyond = at + AHEAD - row_bytes;
                const char *ahead = beyond < 0 ? here[way] + at + AHEAD : next[way] + beyond;
                _mm_prefetch(ahead, _MM_HINT_T0);
                _mm_prefetch(ahead + 64, _MM_HINT_T0);
                copy_stride(there[way] + at, here[way] + at, stream);
            }
    }
    _mm_sfence();
    for (Py_ssize_t row = WAYS * num_each; row < num_rows; row++)
        memcpy(target + to[row] * row_bytes, source + from[row] * row_bytes, row_bytes);
}

static int in_strides(const char *target, Py_ssize_t row_bytes)
{
    return row_bytes >= AHEAD && row_bytes % STRIDE == 0 && (uintptr_t)target % 16 == 0;
}
#else
#define copy_side_by_side(...)
#define in_strides(...) 0
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

static int copy_checked(Py_buffer *target, Py_buffer *to, Py_buffer *source, Py_buffer *from, Py_ssize_t row_bytes,
                        int stream)
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
    if (in_strides(target->buf, row_bytes) && stream)
        copy_side_by_side(target->buf, to_row, source->buf, from_row, num_rows, row_bytes, 1);
    else if (in_strides(target->buf, row_bytes))
        copy_side_by_side(target->buf, to_row, source->buf, from_row, num_rows, row_bytes, 0);
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
    int stream;
    if (!PyArg_ParseTuple(args, "w*y*y*y*np", &target, &to, &source, &from, &row_bytes, &stream))
        return NULL;
    int copied = copy_checked(&target, &to, &source, &from, row_bytes, stream);
    PyBuffer_Release(&target);
    PyBuffer_Release(&to);
    PyBuffer_Release(&source);
    PyBuffer_Release(&from);
    return copied ? Py_NewRef(Py_None) : NULL;
}

static PyMethodDef methods[] = {
    {"copy_rows", copy_rows, METH_VARARGS, "copy_rows(target, to, source, from, row_bytes, stream)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_rows", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__rows(void) { return PyModule_Create(&module); }
