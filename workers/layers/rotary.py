"""Rotary position embedding: Su et al. 2021, in the half-split form of Hugging Face's Llama."""

from __future__ import annotations

import torch

# cos and sin, each [num_tokens, 1, head_dim]; the first half of sin is negative.
Angles = tuple[torch.Tensor, torch.Tensor]


class RotaryEmbedding:
    """The pair (i, i + head_dim / 2) of each head turns by position * theta^(-2i / head_dim)."""

    def __init__(self, head_dim: int, theta: float, device: torch.device) -> None:
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        self._inv_freq = (1.0 / theta**exponents).to(device)

    def angles(self, positions: torch.Tensor, dtype: torch.dtype) -> Angles:
        """For `positions` [num_tokens]; the same in every layer."""
        turns = (positions.float()[:, None] * self._inv_freq).unsqueeze(1)
        cos, sin = turns.cos(), turns.sin()
        return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def rotate(x: torch.Tensor, angles: Angles) -> torch.Tensor:
    """`x` is [num_tokens, num_heads, head_dim]."""
    cos, sin = angles
    return torch.addcmul(x * cos, torch.roll(x, x.shape[-1] // 2, dims=-1), sin)
