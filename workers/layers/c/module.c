/* The kernels as functions of workers.layers._kernels. Tensors come as addresses: compiled.py knows that they are what
   is said here, and keeps them alive. */

#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include "kernels.h"

typedef unsigned long long Address;
#define AS_POINTER(address) ((void *)(uintptr_t)(address))

static PyObject *py_rms_norm(PyObject *module, PyObject *args)
{
    Address x, weight, out;
    long long num_rows, size;
    struct Norm norm;
    int num_threads;
    if (!PyArg_ParseTuple(args, "KKKLLfppi", &x, &weight, &out, &num_rows, &size, &norm.eps, &norm.x_bf16,
                          &norm.weight_bf16, &num_threads))
        return NULL;
    norm.x = AS_POINTER(x), norm.weight = AS_POINTER(weight), norm.out = AS_POINTER(out);
    norm.num_rows = num_rows, norm.size = size;
    rms_norm(&norm, num_threads);
    Py_RETURN_NONE;
}

static PyObject *py_silu_mul(PyObject *module, PyObject *args)
{
    Address x, out;
    long long num_rows, size;
    struct Gate gate;
    int num_threads;
    if (!PyArg_ParseTuple(args, "KKLLpi", &x, &out, &num_rows, &size, &gate.bf16, &num_threads))
        return NULL;
    gate.x = AS_POINTER(x), gate.out = AS_POINTER(out);
    gate.num_rows = num_rows, gate.size = size;
    silu_mul(&gate, num_threads);
    Py_RETURN_NONE;
}

static PyObject *py_rotate(PyObject *module, PyObject *args)
{
    Address x, cos, sin;
    long long num_rows, num_heads, row_stride, head_stride, dim;
    struct Turn turn;
    int num_threads;
    if (!PyArg_ParseTuple(args, "KKKLLLLLpi", &x, &cos, &sin, &num_rows, &num_heads, &row_stride, &head_stride, &dim,
                          &turn.bf16, &num_threads))
        return NULL;
    turn.x = AS_POINTER(x), turn.cos = AS_POINTER(cos), turn.sin = AS_POINTER(sin);
    turn.num_rows = num_rows, turn.num_heads = num_heads, turn.row_stride = row_stride;
    turn.head_stride = head_stride, turn.dim = dim;
    rotate(&turn, num_threads);
    Py_RETURN_NONE;
}

static int all_below(const int64_t *index, int64_t count, int64_t limit, const char *what)
{
    for (int64_t i = 0; i < count; i++)
        if (index[i] < 0 || index[i] >= limit) {
            PyErr_Format(PyExc_IndexError, "%s %lld is not among the %lld that there are", what, (long long)index[i],
                         (long long)limit);
            return 0;
        }
    return 1;
}

static PyObject *py_keep(PyObject *module, PyObject *args)
{
    Address k, v, k_cache, v_cache, slots;
    long long num_rows, k_stride, v_stride, size, num_slots;
    struct Keep kept;
    if (!PyArg_ParseTuple(args, "KKKKKLLLLLpp", &k, &v, &k_cache, &v_cache, &slots, &num_rows, &k_stride, &v_stride,
                          &size, &num_slots, &kept.bf16, &kept.cache_bf16))
        return NULL;
    kept.k = AS_POINTER(k), kept.v = AS_POINTER(v), kept.k_cache = AS_POINTER(k_cache);
    kept.v_cache = AS_POINTER(v_cache), kept.slots = AS_POINTER(slots);
    kept.num_rows = num_rows, kept.k_stride = k_stride, kept.v_stride = v_stride, kept.size = size;
    if (!all_below(kept.slots, num_rows, num_slots, "slot"))
        return NULL;
    keep(&kept);
    Py_RETURN_NONE;
}

static int all_visible(const struct Attention *a)
{
    for (int64_t row = 0; row < a->num_rows; row++)
        if (a->visible[2 * row] < 0 || a->visible[2 * row] >= a->visible[2 * row + 1] ||
            a->visible[2 * row + 1] > a->num_blocks * a->block_size) {
            PyErr_Format(PyExc_IndexError, "row %lld sees keys that are not in its blocks", (long long)row);
            return 0;
        }
    return 1;
}

static PyObject *py_attend(PyObject *module, PyObject *args)
{
    Address q, k_cache, v_cache, out, block_ids, visible;
    long long num_rows, row_stride, num_blocks, pool_blocks, block_size, num_heads, num_kv_heads, head_dim;
    struct Attention a;
    int num_threads;
    if (!PyArg_ParseTuple(args, "KKKKKKLLLLLLLLfppi", &q, &k_cache, &v_cache, &out, &block_ids, &visible, &num_rows,
                          &row_stride, &num_blocks, &pool_blocks, &block_size, &num_heads, &num_kv_heads, &head_dim,
                          &a.scale, &a.bf16, &a.cache_bf16, &num_threads))
        return NULL;
    a.q = AS_POINTER(q), a.k_cache = AS_POINTER(k_cache), a.v_cache = AS_POINTER(v_cache), a.out = AS_POINTER(out);
    a.block_ids = AS_POINTER(block_ids), a.visible = AS_POINTER(visible);
    a.num_rows = num_rows, a.row_stride = row_stride, a.num_blocks = num_blocks, a.block_size = block_size;
    a.num_heads = num_heads, a.num_kv_heads = num_kv_heads, a.head_dim = head_dim;
    if (!all_visible(&a) || !all_below(a.block_ids, num_rows * num_blocks, pool_blocks, "block"))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    attend(&a, num_threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *py_attend_prompt(PyObject *module, PyObject *args)
{
    Address q, k_cache, v_cache, out, block_ids;
    long long num_tokens, row_stride, num_blocks, pool_blocks, block_size, num_heads, num_kv_heads, head_dim, offset;
    long long first_key, window, first_seen;
    struct PromptAttention a;
    int num_threads, done;
    if (!PyArg_ParseTuple(args, "KKKKKLLLLLLLLLLLfppi", &q, &k_cache, &v_cache, &out, &block_ids, &num_tokens,
                          &row_stride, &num_blocks, &pool_blocks, &block_size, &num_heads, &num_kv_heads, &head_dim,
                          &offset, &first_key, &window, &a.scale, &a.bf16, &a.cache_bf16, &num_threads))
        return NULL;
    a.q = AS_POINTER(q), a.k_cache = AS_POINTER(k_cache), a.v_cache = AS_POINTER(v_cache), a.out = AS_POINTER(out);
    a.block_ids = AS_POINTER(block_ids), a.num_tokens = num_tokens, a.row_stride = row_stride;
    a.block_size = block_size, a.num_heads = num_heads, a.num_kv_heads = num_kv_heads, a.head_dim = head_dim;
    a.offset = offset, a.first_key = first_key, a.window = window;
    first_seen = window && offset >= window ? offset + 1 - window : 0;
    if (first_key < 0 || first_key > first_seen || offset + num_tokens > first_key + num_blocks * block_size) {
        PyErr_SetString(PyExc_IndexError, "the chunk sees keys that are not in its blocks");
        return NULL;
    }
    if (!all_below(a.block_ids, num_blocks, pool_blocks, "block"))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    done = attend_prompt(&a, num_threads);
    Py_END_ALLOW_THREADS
    if (!done)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *py_linear_runs(PyObject *module, PyObject *args)
{
    int bf16;
    if (!PyArg_ParseTuple(args, "p", &bf16))
        return NULL;
    return PyBool_FromLong(linear_runs(bf16));
}

static PyObject *py_pack_linear(PyObject *module, PyObject *args)
{
    Address weight, packed;
    long long num_outputs, num_inputs;
    int bf16;
    if (!PyArg_ParseTuple(args, "KKLLp", &weight, &packed, &num_outputs, &num_inputs, &bf16))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    pack_linear(AS_POINTER(weight), AS_POINTER(packed), num_outputs, num_inputs, bf16);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *py_linear(PyObject *module, PyObject *args)
{
    Address x, packed, bias, out;
    long long num_rows, num_outputs, num_inputs;
    struct Linear l;
    int num_threads;
    if (!PyArg_ParseTuple(args, "KKKKLLLpi", &x, &packed, &bias, &out, &num_rows, &num_outputs, &num_inputs, &l.bf16,
                          &num_threads))
        return NULL;
    l.x = AS_POINTER(x), l.packed = AS_POINTER(packed), l.bias = AS_POINTER(bias), l.out = AS_POINTER(out);
    l.num_rows = num_rows, l.num_outputs = num_outputs, l.num_inputs = num_inputs;
    Py_BEGIN_ALLOW_THREADS
    linear(&l, num_threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *py_pack_int4(PyObject *module, PyObject *args)
{
    Address codes, scale, offset, packed;
    long long num_outputs, num_inputs;
    if (!PyArg_ParseTuple(args, "KKKKLL", &codes, &scale, &offset, &packed, &num_outputs, &num_inputs))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    pack_int4(AS_POINTER(codes), AS_POINTER(scale), AS_POINTER(offset), AS_POINTER(packed), num_outputs, num_inputs);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *py_pack_int8(PyObject *module, PyObject *args)
{
    Address codes, packed;
    long long num_outputs, num_inputs;
    if (!PyArg_ParseTuple(args, "KKLL", &codes, &packed, &num_outputs, &num_inputs))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    pack_int8(AS_POINTER(codes), AS_POINTER(packed), num_outputs, num_inputs);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *py_few_bits(PyObject *module, PyObject *args)
{
    Address x, packed, scale, out;
    long long num_rows, num_outputs, num_inputs;
    struct FewBits f;
    int num_threads, done;
    if (!PyArg_ParseTuple(args, "KKKKLLLi", &x, &packed, &scale, &out, &num_rows, &num_outputs, &num_inputs,
                          &num_threads))
        return NULL;
    f.x = AS_POINTER(x), f.packed = AS_POINTER(packed), f.scale = AS_POINTER(scale), f.out = AS_POINTER(out);
    f.sums = NULL, f.num_rows = num_rows, f.num_outputs = num_outputs, f.num_inputs = num_inputs;
    Py_BEGIN_ALLOW_THREADS
    done = few_bits(&f, num_threads);
    Py_END_ALLOW_THREADS
    if (!done)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *py_dynamic_int8_runs(PyObject *module, PyObject *args)
{
    return PyBool_FromLong(dynamic_int8_runs());
}

static PyObject *py_dynamic_int8(PyObject *module, PyObject *args)
{
    Address x, packed, scale, offset, bias, out;
    long long num_rows, num_outputs, num_inputs, rotated;
    struct DynamicInt8 d = {0};
    int num_threads, done;
    if (!PyArg_ParseTuple(args, "KKKKKKLLLLpi", &x, &packed, &scale, &offset, &bias, &out, &num_rows, &num_outputs,
                          &num_inputs, &rotated, &d.bf16, &num_threads))
        return NULL;
    d.x = AS_POINTER(x), d.packed = AS_POINTER(packed), d.scale = AS_POINTER(scale), d.offset = AS_POINTER(offset);
    d.bias = AS_POINTER(bias), d.out = AS_POINTER(out);
    d.num_rows = num_rows, d.num_outputs = num_outputs, d.num_inputs = num_inputs, d.rotated = rotated;
    Py_BEGIN_ALLOW_THREADS
    done = dynamic_int8(&d, num_threads);
    Py_END_ALLOW_THREADS
    if (!done)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"dynamic_int8_runs", py_dynamic_int8_runs, METH_NOARGS, ""},
    {"dynamic_int8", py_dynamic_int8, METH_VARARGS,
     "x, packed, scale, offset, bias, out, num_rows, num_outputs, num_inputs, rotated, bf16, num_threads"},
    {"pack_int4", py_pack_int4, METH_VARARGS, "codes, scale, offset, packed, num_outputs, num_inputs"},
    {"pack_int8", py_pack_int8, METH_VARARGS, "codes, packed, num_outputs, num_inputs"},
    {"few_bits", py_few_bits, METH_VARARGS, "x, packed, scale, out, num_rows, num_outputs, num_inputs, num_threads"},
    {"linear_runs", py_linear_runs, METH_VARARGS, "bf16"},
    {"pack_linear", py_pack_linear, METH_VARARGS, "weight, packed, num_outputs, num_inputs, bf16"},
    {"linear", py_linear, METH_VARARGS, "x, packed, bias, out, num_rows, num_outputs, num_inputs, bf16, num_threads"},
    {"rms_norm", py_rms_norm, METH_VARARGS, "x, weight, out, num_rows, size, eps, x_bf16, weight_bf16, num_threads"},
    {"silu_mul", py_silu_mul, METH_VARARGS, "x, out, num_rows, size, bf16, num_threads"},
    {"rotate", py_rotate, METH_VARARGS,
     "x, cos, sin, num_rows, num_heads, row_stride, head_stride, dim, bf16, num_threads"},
    {"keep", py_keep, METH_VARARGS,
     "k, v, k_cache, v_cache, slots, num_rows, k_stride, v_stride, size, num_slots, bf16, cache_bf16"},
    {"attend", py_attend, METH_VARARGS,
     "q, k_cache, v_cache, out, block_ids, visible, num_rows, row_stride, num_blocks, pool_blocks, block_size, "
     "num_heads, num_kv_heads, head_dim, scale, bf16, cache_bf16, num_threads"},
    {"attend_prompt", py_attend_prompt, METH_VARARGS,
     "q, k_cache, v_cache, out, block_ids, num_tokens, row_stride, num_blocks, pool_blocks, block_size, num_heads, "
     "num_kv_heads, head_dim, offset, first_key, window, scale, bf16, cache_bf16, num_threads"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_kernels", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernels(void)
{
    return PyModule_Create(&definition);
}
