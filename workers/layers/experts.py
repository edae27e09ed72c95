"""A mixture of experts (Shazeer et al. 2017; softmax over all, then the top k as in Mixtral)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workers.layers.linear import Linear
from workers.layers.mlp import GatedMLP


class Experts:
    """Each token's k likeliest experts, weighted by their probabilities; each expert runs once, over all its tokens.

    A token's experts are summed in the order of their numbers, whoever shares the step.
    """

    def __init__(self, router: Linear, experts: Sequence[GatedMLP], num_per_token: int, normalise: bool) -> None:
        """`normalise`: make the weights of a token's experts sum to one."""
        self._router = router
        self._experts = experts
        self._num_per_token = num_per_token
        self._normalise = normalise

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` is [num_tokens, hidden_size]."""
        probs = torch.softmax(self._router(x), dim=-1, dtype=torch.float32)
        weights, chosen = probs.topk(self._num_per_token, dim=-1)  # [num_tokens, num_per_token]
        if self._normalise:
            weights /= weights.sum(dim=-1, keepdim=True)
        by_expert = chosen.flatten().argsort(stable=True)
        tokens = by_expert // self._num_per_token
        weights = weights.flatten()[by_expert, None].to(x.dtype)
        out = torch.zeros_like(x)
        start = 0
        for expert, count in enumerate(torch.bincount(chosen.flatten(), minlength=len(self._experts)).tolist()):
            if count:
                rows = tokens[start : start + count]
                out.index_add_(0, rows, self._experts[expert](x[rows]) * weights[start : start + count])
                start += count
        return out
