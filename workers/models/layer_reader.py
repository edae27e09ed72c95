"""Layers made of a checkpoint's tensors; matrices that share an input are read into one."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from workers.layers.linear import Linear
from workers.layers.norm import RMSNorm
from workers.models.loader import Weights


class LayerReader:
    def __init__(self, weights: Weights, dtype: torch.dtype, device: torch.device) -> None:
        self._weights = weights
        self._dtype = dtype
        self._device = device

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        out = torch.empty(shape, dtype=self._dtype, device=self._device)
        self._weights.copy_into(name, out)
        return out

    def linear(self, rows: Mapping[str, int], in_features: int) -> Linear:
        """One matrix of the tensors named by `rows`, each with its number of rows, one under another."""
        weight = torch.empty(sum(rows.values()), in_features, dtype=self._dtype, device=self._device)
        for name, part in zip(rows, torch.split_with_sizes(weight, list(rows.values())), strict=True):
            self._weights.copy_into(name, part)
        return Linear(weight)

    def norm(self, name: str, size: int, eps: float) -> RMSNorm:
        return RMSNorm(self.tensor(name, size), eps)
