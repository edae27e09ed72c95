"""Log-probabilities of the model's own distribution: of one token a row, and of the likeliest ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from workers.request import TokenLogprobs

# Rows of a long prompt are scored so many at a time, which bounds the memory taken beside the logits.
_CHUNK_ROWS = 64


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Of `token_ids`, one a row of `logits` [num_rows, vocab_size], with the `num_top` likeliest tokens of the row."""
    scores: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), _CHUNK_ROWS):
        end = start + _CHUNK_ROWS
        scores += _score(logits[start:end].float(), token_ids[start:end], num_top)
    return scores


def first_of_top(scores: TokenLogprobs, num_top: int) -> TokenLogprobs:
    """The same with fewer of the likeliest tokens."""
    return replace(scores, top_token_ids=scores.top_token_ids[:num_top], top_logprobs=scores.top_logprobs[:num_top])


def _score(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    ids = torch.tensor(token_ids, device=logits.device).unsqueeze(1)
    own = logits.gather(1, ids)
    total = logits.logsumexp(dim=-1, keepdim=True)
    top_ids = _top_ids(logits, num_top)
    columns = (
        token_ids,
        (own - total).squeeze(1).tolist(),
        _ranks(logits, ids, own).tolist(),
        map(tuple, top_ids.tolist()),
        map(tuple, (logits.gather(1, top_ids) - total).tolist()),
    )
    return [TokenLogprobs(*row) for row in zip(*columns, strict=True)]


def _ranks(logits: torch.Tensor, ids: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Places from 1, [num_rows]: after all that is likelier, and after what is as likely and has a smaller id."""
    earlier = torch.arange(logits.shape[1], device=logits.device) < ids
    return ((logits > own) | ((logits == own) & earlier)).sum(dim=-1) + 1


def _top_ids(logits: torch.Tensor, num_top: int) -> torch.Tensor:
    """Ids of the largest, equal ones by id, [num_rows, num_top]."""
    num_top = min(num_top, logits.shape[1])
    # One more than wanted shows whether the last one has equals that were left out.
    largest = logits.topk(min(num_top + 1, logits.shape[1]))
    ids = largest.indices[:, :num_top].sort(dim=-1).values
    ids = ids.gather(1, logits.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices)
    if 0 < num_top < logits.shape[1]:
        tied = (largest.values[:, -1] == largest.values[:, -2]).nonzero().squeeze(1)
        if tied.numel():
            ids[tied] = logits[tied].sort(dim=-1, descending=True, stable=True).indices[:, :num_top]
    return ids
