"""RMSNorm (Zhang and Sennrich 2019)."""

from __future__ import annotations

import torch
from torch.nn import functional

from workers.layers import compiled


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension, computed in at least fp32."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        """A weight of a wider dtype than x is multiplied by before the result is rounded to x's."""
        self._weight = weight
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        done = compiled.rms_norm(x, self._weight, self._eps)
        if done is not None:
            return done
        wide = x.to(self._weight.dtype)
        return functional.rms_norm(wide, self._weight.shape, self._weight, self._eps).to(x.dtype)


class HeadNorm:
    """RMSNorm of each head by a weight of its own: [num_heads, head_dim]."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` is [num_tokens, num_heads, head_dim]."""
        wide = x.to(self._weight.dtype)
        return functional.rms_norm(wide, self._weight.shape[-1:], None, self._eps).mul_(self._weight).to(x.dtype)
