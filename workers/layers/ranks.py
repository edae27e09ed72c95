"""Those that share one model, each with a part of every layer (tensor parallelism, Shoeybi et al. 2019)."""

from __future__ import annotations

from typing import Protocol

import torch


class Ranks(Protocol):
    """As one of them sees it. What layers take in is the same on all, bit for bit."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Each rank's `x` added up, the same on all; `x` itself may hold it. All must call it in the same order."""


class Alone:
    """Implements Ranks: one with the whole model."""

    rank = 0
    size = 1

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x


ALONE = Alone()
