"""The heads of an attention, as its kernels want them told."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    # Tokens that a query sees, its own included; None: all before it.
    window: int | None = None
    softcap: float | None = None

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def dims(self) -> int:
        """head_dim as a tile has it: a power of two, and no fewer than tl.dot takes."""
        return max(16, 1 << (self.head_dim - 1).bit_length())

    @property
    def log2_scale(self) -> float:
        """What q k^T is multiplied by: such that exp2 is meant by it, or half the argument of a tanh."""
        return (2.0 * self.scale / self.softcap if self.softcap else self.scale) * _LOG2_E

    @property
    def log2_softcap(self) -> float:
        return (self.softcap or 0.0) * _LOG2_E

    def pool(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        """The pool, the scales in it where it is fp8, and how many heads K's half of it has."""
        scales = kv_cache.view(torch.float32) if kv_cache.dtype is torch.uint8 else kv_cache
        return kv_cache, scales, math.prod(kv_cache.shape[1:4])

    def constants(self, kv_cache: torch.Tensor) -> dict[str, int | bool]:
        return {
            "GROUP": self.group,
            "NUM_KV_HEADS": self.num_kv_heads,
            "HEAD_DIM": self.head_dim,
            "DIMS": self.dims,
            "WIDTH": kv_cache.shape[-1],
            "FP8": kv_cache.dtype is torch.uint8,
            "SOFTCAP": self.softcap is not None,
            "WINDOW": self.window or 0,
            "BLOCK_SIZE": kv_cache.shape[2],
        }
