"""RMSNorm."""

from __future__ import annotations

import torch
from torch.nn import functional


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension, computed in at least fp32."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self._weight.shape, self._weight, self._eps)
