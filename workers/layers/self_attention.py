"""The attention half of a layer: project, turn, attend, project."""

from __future__ import annotations

import torch

from workers.layers.attention_kernel import AttentionKernel
from workers.layers.block import Step
from workers.layers.linear import Linear
from workers.layers.norm import HeadNorm
from workers.layers.rotary import RotaryEmbedding, rotate


class SelfAttention:
    """`qkv` is three projections, one under another; `head_norm` applies to the heads of q and k before they turn."""

    def __init__(
        self,
        qkv: Linear,
        out: Linear,
        rotary: RotaryEmbedding,
        kernel: AttentionKernel,
        head_norm: HeadNorm | None = None,
    ) -> None:
        self._qkv = qkv
        self._out = out
        self._rotary = rotary
        self._kernel = kernel
        self._head_norm = head_norm
        self._num_heads, self._num_kv_heads = kernel.num_heads, kernel.num_kv_heads
        self._head_dim = kernel.head_dim

    def __call__(self, x: torch.Tensor, step: Step, kv_cache: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] to the same; kv_cache: the layer's [2, num_blocks, ...]."""
        # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
        heads = self._qkv(x).view(x.shape[0], -1, self._head_dim)
        turned, v = heads.tensor_split((self._num_heads + self._num_kv_heads,), dim=1)
        if self._head_norm is not None:
            turned = self._head_norm(turned)
        turned = rotate(turned, step.angles[self._rotary])
        q, k = turned.tensor_split((self._num_heads,), dim=1)
        return self._out(self._kernel(q, k, v, kv_cache, step.batch))
