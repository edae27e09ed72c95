"""The gated feed-forward half of a layer (Shazeer 2020)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from workers.layers import compiled
from workers.layers.linear import Linear

Activation = Callable[[torch.Tensor], torch.Tensor]


class GatedMLP:
    """down(activation(gate(x)) * up(x)); `gate_up` is both, one under the other."""

    def __init__(self, gate_up: Linear, down: Linear, activation: Activation) -> None:
        self._gate_up = gate_up
        self._down = down
        self._activation = activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._down(gated(self._gate_up(x), self._activation))


def gated(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """activation(gate) * up of [num_tokens, gate | up]."""
    if activation is functional.silu and (done := compiled.silu_mul(gate_up)) is not None:
        return done
    gate, up = gate_up.chunk(2, dim=-1)
    return activation(gate).mul_(up)
