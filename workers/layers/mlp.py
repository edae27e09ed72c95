"""The gated feed-forward half of a layer (Shazeer 2020)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from workers.layers.linear import Linear

Activation = Callable[[torch.Tensor], torch.Tensor]


class GatedMLP:
    """down(activation(gate(x)) * up(x)); `gate_up` is both, one under the other."""

    def __init__(self, gate_up: Linear, down: Linear, activation: Activation) -> None:
        self._gate_up = gate_up
        self._down = down
        self._activation = activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return self._down(self._activation(gate).mul_(up))
