"""Token embedding."""

from __future__ import annotations

import torch
from torch.nn import functional


class Embedding:
    """Rows of `weight` [vocab_size, hidden_size], times `scale` as rounded to their dtype."""

    def __init__(self, weight: torch.Tensor, scale: float | None = None) -> None:
        self.weight = weight
        self._scale = None if scale is None else torch.tensor(scale, dtype=weight.dtype, device=weight.device)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        rows = functional.embedding(token_ids, self.weight)
        return rows if self._scale is None else rows * self._scale
