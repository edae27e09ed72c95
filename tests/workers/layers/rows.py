"""The sampler, with what its rows have in parallel lists."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from workers.layers import sampler
from workers.request import NextToken, SamplingParams, TokensSoFar


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    tokens_so_far: Sequence[TokensSoFar | None] = (),
    eos_token_ids: Collection[int] = (),
) -> list[int]:
    known = tokens_so_far or [None] * len(params)
    rows = [NextToken(p, position, tokens_so_far=k) for p, position, k in zip(params, positions, known, strict=True)]
    return sampler.sample(logits, rows, eos_token_ids)
