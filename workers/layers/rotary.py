"""Rotary position embedding: Su et al. 2021, in the half-split form of Hugging Face's Llama."""

from __future__ import annotations

import torch

from workers.layers import compiled
from workers.models.rope import Rope

# cos and sin, each [num_tokens, 1, rotary dim]; the first half of sin is negative.
Angles = tuple[torch.Tensor, torch.Tensor]


class RotaryEmbedding:
    """The pair (i, i + dim / 2) of each head turns as its Rope says."""

    def __init__(self, rope: Rope, device: torch.device) -> None:
        exponents = torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim
        inv_freq = 1.0 / rope.theta**exponents
        if rope.divisors:
            inv_freq = inv_freq / torch.tensor(rope.divisors)
        self._inv_freq = inv_freq.to(device)
        self._magnitude = rope.magnitude

    def angles(self, positions: torch.Tensor, dtype: torch.dtype) -> Angles:
        """For `positions` [num_tokens]; the same in every layer."""
        turns = (positions.float()[:, None] * self._inv_freq).unsqueeze(1)
        cos, sin = turns.cos(), turns.sin()
        if self._magnitude != 1.0:
            cos, sin = cos * self._magnitude, sin * self._magnitude
        return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def rotate(x: torch.Tensor, angles: Angles) -> torch.Tensor:
    """`x` is [num_tokens, num_heads, head_dim], and may itself be turned; what lies beyond the rotary dim stays."""
    cos, sin = angles
    if compiled.rotate_in_place(x, cos, sin):
        return x
    dim = cos.shape[-1]
    if dim < x.shape[-1]:
        return torch.cat((rotate(x[..., :dim], angles), x[..., dim:]), dim=-1)
    return torch.addcmul(x * cos, torch.roll(x, dim // 2, dims=-1), sin)
