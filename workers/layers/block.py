"""A layer as what it adds to the residual stream; each half of it is the sum of what the ranks make of their parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from workers.engine.batch import StepBatch
from workers.layers.norm import RMSNorm
from workers.layers.ranks import Ranks
from workers.layers.rotary import Angles, RotaryEmbedding

FeedForward = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Step:
    """What all layers of one step share."""

    batch: StepBatch
    angles: Mapping[RotaryEmbedding, Angles]


# (x [num_tokens, hidden_size], step, the layer's KV cache) -> [num_tokens, hidden_size]
Attention = Callable[[torch.Tensor, Step, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class PreNormLayer:
    """x += attention(norm(x)); x += mlp(norm(x))."""

    attention_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: FeedForward
    ranks: Ranks

    def __call__(self, x: torch.Tensor, step: Step, kv_cache: torch.Tensor) -> None:
        x += self.ranks.sum(self.attention(self.attention_norm(x), step, kv_cache))
        x += self.ranks.sum(self.mlp(self.mlp_norm(x)))


@dataclass(frozen=True, slots=True)
class SandwichLayer:
    """x += norm(attention(norm(x))); x += norm(mlp(norm(x)))."""

    attention_norm: RMSNorm
    attention: Attention
    post_attention_norm: RMSNorm
    mlp_norm: RMSNorm
    mlp: FeedForward
    post_mlp_norm: RMSNorm
    ranks: Ranks

    def __call__(self, x: torch.Tensor, step: Step, kv_cache: torch.Tensor) -> None:
        x += self.post_attention_norm(self.ranks.sum(self.attention(self.attention_norm(x), step, kv_cache)))
        x += self.post_mlp_norm(self.ranks.sum(self.mlp(self.mlp_norm(x))))
