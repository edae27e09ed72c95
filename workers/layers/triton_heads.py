"""What the attention kernels share: heads out of the KV pool, and the softmax that keeps up with them.

Exponents are of 2: scores are scaled by log2(e) beforehand.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The interpreter multiplies the bit patterns of bf16.
_WIDEN = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def product(a, b):
    """[m, k] x [k, n] in fp32, without rounding fp32 to tf32."""
    if _WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def load_heads(kv_ptr, scale_ptr, at, seen, dims, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, FP8: tl.constexpr):
    """[len(at), len(dims)]: the heads number `at` of a pool, 0 where not `seen`. FP8: as kv_codec.py packs them."""
    mask = seen[:, None] & (dims < HEAD_DIM)[None, :]
    numbers = tl.load(kv_ptr + at[:, None] * WIDTH + dims[None, :], mask=mask, other=0)
    if FP8:
        scales = tl.load(scale_ptr + at * (WIDTH // 4) + HEAD_DIM // 4, mask=seen, other=0.0)
        numbers = numbers.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scales[:, None]
    return numbers


@triton.jit
def scores_of(q, k, scale, softcap, SOFTCAP: tl.constexpr):
    """q k^T * scale; with SOFTCAP, softcap * tanh of a softcap-th of it, both in units of log2."""
    scores = product(q, tl.trans(k)) * scale
    if SOFTCAP:
        scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(scores)))
    return scores


@triton.jit
def fold(scores, v, largest, total, acc):
    """Take the keys of one tile into a running softmax (Milakov and Gimelshein 2018); -inf: a key that is not seen.

    largest, total: [rows]; acc: [rows, dims], fp32. A row that has seen no key yet stays as it is.
    """
    new = tl.maximum(largest, tl.max(scores, 1))
    finite = tl.where(new == float("-inf"), 0.0, new)
    kept = tl.exp2(largest - finite)
    weights = tl.exp2(scores - finite[:, None])
    total = total * kept + tl.sum(weights, 1)
    acc = acc * kept[:, None] + product(weights.to(v.dtype), v)
    return new, total, acc
