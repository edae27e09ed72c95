"""Kernels for CPUs in C (workers/layers/c/), where there was a compiler; each says whether it took the work.

They are for float32 and bfloat16, and for sizes in multiples of what a vector register holds. Whoever calls one has the
same in torch for everything else, and the tests hold the two equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from workers.layers.attention_plan import PrefillChunk

try:
    import workers.layers._kernels as _kernels
except ImportError:  # It is built where there is a compiler.
    _kernels = None

_LANES = 16
_MAX_HEAD_DIM = 256
# VNNI takes activations without a sign: their codes are kept so much greater.
_ZERO_CODE = 128
_BF16 = torch.bfloat16
_DTYPES = (torch.float32, torch.bfloat16)


def available() -> bool:
    return _kernels is not None


def kind(dtype: torch.dtype) -> str:
    """What computes with numbers of it on this CPU: two kinds round differently."""
    if _kernels is None:
        return "torch"
    kinds = {"c": True, "panels": _kernels.linear_runs(dtype is _BF16), "int8 by int8": _kernels.dynamic_int8_runs()}
    return ", ".join(name for name, runs in kinds.items() if runs)


def takes(x: torch.Tensor, size: int) -> bool:
    """Whether rows of `size` numbers like those of x are for a kernel."""
    return _kernels is not None and x.dtype in _DTYPES and x.device.type == "cpu" and size % _LANES == 0


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor | None:
    """As RMSNorm, of x [num_rows, size]; None: not for this kernel."""
    size = x.shape[-1]
    if not takes(x, size) or weight.dtype not in (x.dtype, torch.float32):
        return None
    x = x.contiguous()
    out = torch.empty_like(x)
    _kernels.rms_norm(
        x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // size, size, eps,
        x.dtype is _BF16, weight.dtype is _BF16, torch.get_num_threads(),
    )  # fmt: skip
    return out


def silu_mul(x: torch.Tensor) -> torch.Tensor | None:
    """silu(gate) * up of x [..., gate | up], contiguous; None: not for this kernel."""
    size = x.shape[-1] // 2
    if not takes(x, size) or not x.is_contiguous():
        return None
    out = torch.empty((*x.shape[:-1], size), dtype=x.dtype)
    _kernels.silu_mul(
        x.data_ptr(), out.data_ptr(), out.numel() // size, size, x.dtype is _BF16, torch.get_num_threads()
    )
    return out


def rotate_in_place(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """As rotary.rotate, of x [num_tokens, num_heads, head_dim] itself; False: not for this kernel."""
    num_tokens, num_heads, _ = x.shape
    dim = cos.shape[-1]
    if not takes(x, dim // 2) or x.stride(-1) != 1 or cos.dtype is not x.dtype:
        return False
    _kernels.rotate(
        x.data_ptr(), cos.data_ptr(), sin.data_ptr(), num_tokens, num_heads, x.stride(0), x.stride(1), dim,
        x.dtype is _BF16, torch.get_num_threads(),
    )  # fmt: skip
    return True


def pages(dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, device: torch.device) -> bool:
    """Whether keep and attend are for heads and a cache like these."""
    known = dtype in _DTYPES and cache_dtype in _DTYPES and device.type == "cpu"
    return _kernels is not None and known and head_dim % _LANES == 0 and head_dim <= _MAX_HEAD_DIM


def keep(k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Store k and v [num_tokens, num_kv_heads, head_dim], in their slots of a layer's cache."""
    size = k.shape[1] * k.shape[2]
    assert k.stride()[1:] == v.stride()[1:] == (k.shape[2], 1), "heads lie one behind the other"
    _kernels.keep(
        k.data_ptr(), v.data_ptr(), *_halves(kv_cache), slots.data_ptr(),
        k.shape[0], k.stride(0), v.stride(0), size, kv_cache.numel() // 2 // size,
        k.dtype is _BF16, kv_cache.dtype is _BF16,
    )  # fmt: skip


def attend(
    q: torch.Tensor, kv_cache: torch.Tensor, block_ids: torch.Tensor, visible: torch.Tensor, scale: float
) -> torch.Tensor:
    """Each row of q [num_rows, num_heads, head_dim] over keys visible[row, 0] to visible[row, 1] of its blocks.

    block_ids: [num_rows, num_blocks]; kv_cache: a layer's; returns [num_rows, num_heads * head_dim].
    """
    _, pool_blocks, block_size, num_kv_heads, _ = kv_cache.shape
    num_rows, num_heads, head_dim = q.shape
    assert q.stride()[1:] == (head_dim, 1), "heads lie one behind the other"
    assert len(block_ids) == len(visible) == num_rows, "each row has its blocks"
    out = torch.empty((num_rows, num_heads * head_dim), dtype=q.dtype)
    _kernels.attend(
        q.data_ptr(), *_halves(kv_cache), out.data_ptr(), block_ids.data_ptr(), visible.data_ptr(),
        num_rows, q.stride(0), block_ids.shape[1], pool_blocks, block_size, num_heads, num_kv_heads, head_dim, scale,
        q.dtype is _BF16, kv_cache.dtype is _BF16, torch.get_num_threads(),
    )  # fmt: skip
    return out


def attends_prompts(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether attend_prompt is for heads like these, where `pages` is, on this processor."""
    return head_dim % (2 * _LANES) == 0 and bool(_kernels.linear_runs(dtype is _BF16))


def attend_prompt(q: torch.Tensor, kv_cache: torch.Tensor, chunk: PrefillChunk, scale: float) -> torch.Tensor:
    """q [num_tokens, num_heads, head_dim] of a chunk over a layer's cache, to [num_tokens, num_heads * head_dim]."""
    _, pool_blocks, block_size, num_kv_heads, _ = kv_cache.shape
    num_tokens, num_heads, head_dim = q.shape
    assert q.stride()[1:] == (head_dim, 1), "heads lie one behind the other"
    out = torch.empty((num_tokens, num_heads * head_dim), dtype=q.dtype)
    _kernels.attend_prompt(
        q.data_ptr(), *_halves(kv_cache), out.data_ptr(), chunk.block_ids.data_ptr(),
        num_tokens, q.stride(0), len(chunk.block_ids), pool_blocks, block_size, num_heads, num_kv_heads, head_dim,
        chunk.start, chunk.first_key, chunk.window or 0, scale,
        q.dtype is _BF16, kv_cache.dtype is _BF16, torch.get_num_threads(),
    )  # fmt: skip
    return out


def _halves(kv_cache: torch.Tensor) -> tuple[int, int]:
    """Where K and V begin. (Views of tensors cost as much as a kernel of few rows.)"""
    assert kv_cache.is_contiguous(), "a layer's cache is one piece of the pool"
    start = kv_cache.data_ptr()
    return start, start + kv_cache.nbytes // 2


def multiplies(weight: torch.Tensor) -> bool:
    """Whether linear is for such a matrix [num_outputs, num_inputs], on this processor."""
    num_outputs, num_inputs = weight.shape
    return takes(weight, num_outputs) and num_inputs % 2 == 0 and bool(_kernels.linear_runs(weight.dtype is _BF16))


def pack_linear(weight: torch.Tensor) -> torch.Tensor:
    """As linear wants it; of the same shape."""
    weight = weight.contiguous()
    packed = torch.empty_like(weight)
    _kernels.pack_linear(weight.data_ptr(), packed.data_ptr(), *weight.shape, weight.dtype is _BF16)
    return packed


def linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., num_inputs], of the weights' dtype, to [..., num_outputs]."""
    num_outputs, num_inputs = packed.shape
    if x.dtype is not packed.dtype or x.shape[-1] != num_inputs:
        raise ValueError(f"{x.dtype} rows of {x.shape[-1]} are not for {packed.dtype} weights of {num_inputs} inputs")
    x = x.contiguous()
    out = torch.empty((*x.shape[:-1], num_outputs), dtype=x.dtype)
    _kernels.linear(
        x.data_ptr(), packed.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(),
        x.numel() // num_inputs, num_outputs, num_inputs, x.dtype is _BF16, torch.get_num_threads(),
    )  # fmt: skip
    return out


def unpacks(weight: torch.Tensor) -> bool:
    """Whether few_bits is for such a matrix [num_outputs, num_inputs] in fewer bits, on this processor."""
    fits = weight.shape[0] % _LANES == 0 and weight.shape[1] % 2 == 0 and weight.device.type == "cpu"
    return _kernels is not None and fits and bool(_kernels.linear_runs(True))


def pack_int4(codes: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """codes: int8 [num_outputs, num_inputs] from -8 to 7; scale, offset: fp32 [num_outputs, num_inputs / 32]."""
    assert codes.shape == (scale.shape[0], 32 * scale.shape[1])
    assert scale.shape == offset.shape
    codes, scale, offset = codes.contiguous(), scale.contiguous(), offset.contiguous()
    packed = torch.empty(codes.numel() // 16 * 10, dtype=torch.uint8)
    _kernels.pack_int4(codes.data_ptr(), scale.data_ptr(), offset.data_ptr(), packed.data_ptr(), *codes.shape)
    return packed


def pack_int8(codes: torch.Tensor) -> torch.Tensor:
    """codes: int8 [num_outputs, num_inputs], inputs in pairs."""
    assert codes.shape[1] % 2 == 0
    codes = codes.contiguous()
    packed = torch.empty_like(codes)
    _kernels.pack_int8(codes.data_ptr(), packed.data_ptr(), *codes.shape)
    return packed


def few_bits(x: torch.Tensor, packed: torch.Tensor, num_outputs: int, scale: torch.Tensor | None) -> torch.Tensor:
    """bf16 rows x [num_rows, num_inputs] to [num_rows, num_outputs]; `scale`: of pack_int8's, fp32 [num_outputs]."""
    num_rows, num_inputs = x.shape
    size = num_outputs * num_inputs if scale is not None else num_outputs * num_inputs // 16 * 10
    if x.dtype is not _BF16 or packed.numel() != size:
        raise ValueError(f"{x.dtype} rows of {num_inputs} are not for these weights of {num_outputs} outputs")
    x = x.contiguous()
    out = torch.empty((num_rows, num_outputs), dtype=_BF16)
    _kernels.few_bits(
        x.data_ptr(), packed.data_ptr(), 0 if scale is None else scale.data_ptr(), out.data_ptr(),
        num_rows, num_outputs, num_inputs, torch.get_num_threads(),
    )  # fmt: skip
    return out


def rounds(weight: torch.Tensor) -> bool:
    """Whether dynamic_int8 is for such a matrix [num_outputs, num_inputs], on this processor."""
    fits = weight.shape[0] % _LANES == 0 and weight.shape[1] % _LANES == 0 and weight.dtype in _DTYPES
    return _kernels is not None and fits and weight.device.type == "cpu" and bool(_kernels.dynamic_int8_runs())


@dataclass(frozen=True, slots=True)
class Int8Weights:
    """Of rows that were rotated as those that they will be multiplied by, by Hadamard's matrix of size `rotated`."""

    # int8 [num_outputs, num_inputs], in panels.
    packed: torch.Tensor
    # fp32 [num_outputs]
    scale: torch.Tensor
    # int32 [num_outputs]: what the sums begin with.
    offset: torch.Tensor
    # fp32 [num_outputs]
    bias: torch.Tensor | None
    rotated: int


def pack_dynamic_int8(codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, rotated: int) -> Int8Weights:
    """codes: int8 [num_outputs, num_inputs]."""
    # Four codes to a word.
    packed = torch.empty_like(codes)
    _kernels.pack_linear(codes.contiguous().data_ptr(), packed.data_ptr(), codes.shape[0], codes.shape[1] // 4, False)
    offset = -_ZERO_CODE * codes.sum(-1, dtype=torch.int32)
    return Int8Weights(packed, scale.contiguous(), offset, None if bias is None else bias.float(), rotated)


def dynamic_int8(x: torch.Tensor, weights: Int8Weights) -> torch.Tensor:
    """x [..., num_inputs] to [..., num_outputs], of its dtype; each row is rounded to 8 bits on the way."""
    num_outputs, num_inputs = weights.packed.shape
    if x.dtype not in _DTYPES or x.shape[-1] != num_inputs:
        raise ValueError(f"{x.dtype} rows of {x.shape[-1]} are not for weights of {num_inputs} inputs")
    x = x.contiguous()
    out = torch.empty((*x.shape[:-1], num_outputs), dtype=x.dtype)
    _kernels.dynamic_int8(
        x.data_ptr(), weights.packed.data_ptr(), weights.scale.data_ptr(), weights.offset.data_ptr(),
        0 if weights.bias is None else weights.bias.data_ptr(), out.data_ptr(),
        x.numel() // num_inputs, num_outputs, num_inputs, weights.rotated, x.dtype is _BF16, torch.get_num_threads(),
    )  # fmt: skip
    return out
