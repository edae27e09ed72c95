"""Logits with a soft cap (Gemma 2)."""

from __future__ import annotations

import torch

from workers.layers.linear import Linear


class SoftCappedHead:
    """cap * tanh(logits / cap)."""

    def __init__(self, head: Linear, cap: float) -> None:
        self._head = head
        self._cap = cap

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self._head(x) / self._cap) * self._cap
