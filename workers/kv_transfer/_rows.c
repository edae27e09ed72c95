/* copy_rows: many short pieces of memory at the machine's rate, and their checksums; workers/kv_transfer/rows.py says
   what it does.

   A copy larger than the caches gains from three things that memcpy, called for one row after another, does not do:
   several rows at once, fetches that run ahead across the end of a row, where the processor's own stop, and stores
   that do not first read what they replace. While it waits for memory, the checksums cost next to nothing. */

#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <nmmintrin.h>
#include <stdint.h>
#include <string.h>

#define WAYS 4
#define AHEAD 512
#define STRIDE 128
#define CRC_SEED 0xFFFFFFFFu

/* Row from[i] of source goes to row to[i] of target, and the CRC-32C of each of its units to crcs[i * units of a row].
   Either of target and crcs may be NULL. */
struct copy {
    char *target;
    uint32_t *crcs;
    const char *source;
    const int64_t *to, *from;
    Py_ssize_t num_rows, row_bytes, unit_bytes;
};

__attribute__((target("sse4.2"))) static uint32_t crc_of(const char *data, Py_ssize_t num_bytes)
{
    uint64_t crc = CRC_SEED, word;
    for (; num_bytes >= 8; data += 8, num_bytes -= 8) {
        memcpy(&word, data, 8);
        crc = _mm_crc32_u64(crc, word);
    }
    for (; num_bytes > 0; data++, num_bytes--)
        crc = _mm_crc32_u8((uint32_t)crc, (unsigned char)*data);
    return ~(uint32_t)crc;
}

static void copy_one_by_one(struct copy copy, Py_ssize_t first)
{
    Py_ssize_t num_units = copy.crcs ? copy.row_bytes / copy.unit_bytes : 0;
    for (Py_ssize_t row = first; row < copy.num_rows; row++) {
        const char *here = copy.source + copy.from[row] * copy.row_bytes;
        if (copy.target)
            memcpy(copy.target + copy.to[row] * copy.row_bytes, here, copy.row_bytes);
        for (Py_ssize_t unit = 0; unit < num_units; unit++)
            copy.crcs[row * num_units + unit] = crc_of(here + unit * copy.unit_bytes, copy.unit_bytes);
    }
}

/* The next stride; the checksum with it. */
static inline __attribute__((always_inline, target("sse4.2"))) uint64_t
copy_stride(char *to, const char *from, uint64_t crc, int has_target, int has_crcs)
{
    for (int at = 0; at < STRIDE; at += 16) {
        __m128i piece = _mm_loadu_si128((const __m128i *)(from + at));
        if (has_target)
            _mm_stream_si128((__m128i *)(to + at), piece);
        if (has_crcs) {
            crc = _mm_crc32_u64(crc, (uint64_t)_mm_cvtsi128_si64(piece));
            crc = _mm_crc32_u64(crc, (uint64_t)_mm_extract_epi64(piece, 1));
        }
    }
    return crc;
}

static inline __attribute__((always_inline, target("sse4.2"))) void copy_side_by_side(struct copy copy, int has_target,
                                                                                       int has_crcs)
{
    Py_ssize_t num_each = copy.num_rows / WAYS, row_bytes = copy.row_bytes;
    Py_ssize_t unit_bytes = has_crcs ? copy.unit_bytes : row_bytes, num_units = row_bytes / unit_bytes;
    char *there[WAYS];
    const char *here[WAYS], *next[WAYS];
    uint64_t crc[WAYS];
    for (Py_ssize_t i = 0; i < num_each; i++) {
        for (int way = 0; way < WAYS; way++) {
            Py_ssize_t row = i + way * num_each;
            there[way] = has_target ? copy.target + copy.to[row] * row_bytes : NULL;
            here[way] = copy.source + copy.from[row] * row_bytes;
            next[way] = copy.source + copy.from[i + 1 < num_each ? row + 1 : row] * row_bytes;
        }
        for (Py_ssize_t unit = 0; unit < num_units; unit++) {
            for (int way = 0; way < WAYS; way++)
                crc[way] = CRC_SEED;
            for (Py_ssize_t at = unit * unit_bytes; at < (unit + 1) * unit_bytes; at += STRIDE)
                for (int way = 0; way < WAYS; way++) {
                    Py_ssize_t beyond = at + AHEAD - row_bytes;
                    const char *ahead = beyond < 0 ? here[way] + at + AHEAD : next[way] + beyond;
                    _mm_prefetch(ahead, _MM_HINT_T0);
                    _mm_prefetch(ahead + 64, _MM_HINT_T0);
                    crc[way] = copy_stride(there[way] + at, here[way] + at, crc[way], has_target, has_crcs);
                }
            for (int way = 0; has_crcs && way < WAYS; way++)
                copy.crcs[(i + way * num_each) * num_units + unit] = ~(uint32_t)crc[way];
        }
    }
    _mm_sfence();
    copy_one_by_one(copy, WAYS * num_each);
}

__attribute__((target("sse4.2"))) static void copy_all(struct copy copy)
{
    int in_strides = copy.row_bytes >= AHEAD && copy.row_bytes % STRIDE == 0 && (uintptr_t)copy.target % 16 == 0 &&
                     (!copy.crcs || copy.unit_bytes % STRIDE == 0);
    if (!in_strides)
        copy_one_by_one(copy, 0);
    else if (!copy.crcs)
        copy_side_by_side(copy, 1, 0);
    else if (!copy.target)
        copy_side_by_side(copy, 0, 1);
    else
        copy_side_by_side(copy, 1, 1);
}

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

/* Empty ones are not wanted. */
static int copy_checked(Py_buffer *target, Py_buffer *to, Py_buffer *source, Py_buffer *from, Py_buffer *crcs,
                        Py_ssize_t row_bytes, Py_ssize_t unit_bytes)
{
    Py_ssize_t num_rows = from->len / (Py_ssize_t)sizeof(int64_t);
    if (row_bytes <= 0 || from->len % sizeof(int64_t) || (target->len && to->len != from->len)) {
        PyErr_SetString(PyExc_ValueError, "rows of at least one byte, and as many to as from, are wanted");
        return 0;
    }
    if (crcs->len && (unit_bytes <= 0 || row_bytes % unit_bytes ||
                      crcs->len / (Py_ssize_t)sizeof(uint32_t) != num_rows * (row_bytes / unit_bytes))) {
        PyErr_SetString(PyExc_ValueError, "a checksum for each unit, and whole units in a row, are wanted");
        return 0;
    }
    if ((target->len && !rows_inside(to, target, row_bytes)) || !rows_inside(from, source, row_bytes))
        return 0;
    struct copy copy = {target->len ? target->buf : NULL, crcs->len ? crcs->buf : NULL, source->buf, to->buf,
                        from->buf, num_rows, row_bytes, unit_bytes};
    Py_BEGIN_ALLOW_THREADS
    if (copy.target || copy.crcs)
        copy_all(copy);
    Py_END_ALLOW_THREADS
    return 1;
}

static PyObject *copy_rows(PyObject *module, PyObject *args)
{
    Py_buffer target, to, source, from, crcs;
    Py_ssize_t row_bytes, unit_bytes;
    if (!PyArg_ParseTuple(args, "w*y*y*y*w*nn", &target, &to, &source, &from, &crcs, &row_bytes, &unit_bytes))
        return NULL;
    int copied = copy_checked(&target, &to, &source, &from, &crcs, row_bytes, unit_bytes);
    PyBuffer_Release(&target);
    PyBuffer_Release(&to);
    PyBuffer_Release(&source);
    PyBuffer_Release(&from);
    PyBuffer_Release(&crcs);
    return copied ? Py_NewRef(Py_None) : NULL;
}

static PyMethodDef methods[] = {
    {"copy_rows", copy_rows, METH_VARARGS, "copy_rows(target, to, source, from, crcs, row_bytes, unit_bytes)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_rows", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__rows(void)
{
    if (!__builtin_cpu_supports("sse4.2"))
        return PyErr_SetString(PyExc_ImportError, "this processor computes no CRC-32C"), NULL;
    return PyModule_Create(&module);
}
