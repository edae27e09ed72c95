"""How a head of K or V lies in the KV pool, whose dtype may be smaller than the model's.

float32, bfloat16, float16: the numbers themselves. uint8: float8_e4m3fn numbers with a float32 scale behind them, one
for each token and KV head, so that what is kept of a token depends on no other: [head_dim bytes | 4 bytes].
"""

from __future__ import annotations

import torch

from workers.kv_transfer.layout import SCALE_BYTES

# KVLayout.dtype to what the pool's tensor has.
POOL_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3": torch.uint8,
}
_FP8 = torch.float8_e4m3fn
_FP8_MAX = torch.finfo(_FP8).max  # 448
_SCALE_BYTES = SCALE_BYTES["float8_e4m3"]


def pool_width(dtype: torch.dtype, head_dim: int) -> int:
    """Elements of the pool's dtype that a head takes."""
    return head_dim + _SCALE_BYTES if dtype is torch.uint8 else head_dim


def encode(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[..., head_dim] as a pool of `dtype` keeps it, [..., pool_width]; x itself where that is the same."""
    if dtype is not torch.uint8:
        return x.to(dtype)
    wide = x.float()
    # The largest number of a head becomes the largest of fp8. A head of zeros has any scale.
    scales = (wide.abs().amax(dim=-1, keepdim=True) / _FP8_MAX).clamp_(min=torch.finfo(torch.float32).tiny)
    numbers = (wide / scales).clamp_(-_FP8_MAX, _FP8_MAX).to(_FP8)
    return torch.cat((numbers.view(torch.uint8), scales.view(torch.uint8)), dim=-1)


def decode(kept: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[..., pool_width] of a pool as numbers of `dtype`, [..., head_dim]; `kept` itself where that is the same."""
    if kept.dtype is not torch.uint8:
        return kept.to(dtype)
    numbers, scales = kept[..., :-_SCALE_BYTES].view(_FP8), kept[..., -_SCALE_BYTES:].view(torch.float32)
    return (numbers.float() * scales).to(dtype)


def cast(kept: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[..., pool_width] of one pool as a pool of `dtype` keeps it; `kept` itself where that is the same."""
    return kept if kept.dtype is dtype else encode(decode(kept, torch.float32), dtype)
