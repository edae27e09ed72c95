"""From logits to tokens, whatever mix of settings shares the step.

A draw is the inverse of the cumulative distribution in token id order at uniform(seed, choice, position): it depends on
nothing but the row's own logits, and small changes of these move it only across neighbouring borders.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch

from workers.layers.logits_processors import process_logits
from workers.random import uniform
from workers.request import NextToken, SamplingParams

# Candidates tried for top_p before sorting the whole vocabulary, which takes 20 times as long.
_NUCLEUS_CANDIDATES = 256


def sample(
    logits: torch.Tensor,
    samples: Sequence[NextToken],
    eos_token_ids: Collection[int] = (),
    allowed: Mapping[int, np.ndarray] = MappingProxyType({}),
) -> list[int]:
    """One token a row of `logits` [num_rows, vocab_size].

    `allowed`, by row: what a grammar leaves of it, bool [vocab_size].
    The order is vLLM's: logit_bias, penalties, min_tokens, grammar, temperature, min_p, top_k, top_p.
    """
    plain = [one.params.greedy and not one.params.logit_bias and one.tokens_so_far is None for one in samples]
    if all(plain):
        return _likeliest(logits)
    tokens = [0] * len(samples)
    rows = [row for row, is_plain in enumerate(plain) if is_plain]
    _fill(tokens, rows, _likeliest(logits[rows]) if rows else ())
    rows = [row for row, is_plain in enumerate(plain) if not is_plain]
    own = [samples[row] for row in rows]
    own_logits = logits[rows].float()
    process_logits(own_logits, own, eos_token_ids)
    for at, row in enumerate(rows):
        if row in allowed:
            own_logits[at].masked_fill_(torch.from_numpy(~allowed[row]).to(own_logits.device), float("-inf"))
    _fill(tokens, rows, _choose(own_logits, own))
    return tokens


def _likeliest(logits: torch.Tensor) -> list[int]:
    # As float32, which argmax takes four times as fast as bfloat16.
    return logits.float().argmax(dim=-1).tolist()


def _fill(tokens: list[int], rows: Sequence[int], chosen: Sequence[int]) -> None:
    for row, token in zip(rows, chosen, strict=True):
        tokens[row] = token


def _choose(logits: torch.Tensor, samples: Sequence[NextToken]) -> list[int]:
    drawn = [row for row, one in enumerate(samples) if not one.params.greedy]
    if len(drawn) == len(samples):
        return _draw(logits, samples)
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    if drawn:
        _fill(tokens, drawn, _draw(logits[drawn], [samples[row] for row in drawn]))
    return tokens


def _draw(logits: torch.Tensor, samples: Sequence[NextToken]) -> list[int]:
    params = [one.params for one in samples]
    # From the largest down, so that no temperature overflows.
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / _column([p.temperature for p in params], logits)
    _keep_min_p(logits, params)
    _keep_top_k(logits, params)
    probs = torch.softmax(logits, dim=-1)
    _keep_top_p(probs, params)
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    draws = _column([uniform(one.params.seed or 0, one.choice, one.position) for one in samples], total)
    # Rounding may lift the product to the total, behind the last token that has any probability.
    target = torch.minimum(draws * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).tolist()


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)


def _keep_min_p(logits: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """Drop, in place, what is less than min_p as likely as the likeliest; `logits` has 0 for that one."""
    if any(p.min_p > 0.0 for p in params):
        borders = _column([math.log(p.min_p) if p.min_p > 0.0 else float("-inf") for p in params], logits)
        logits.masked_fill_(logits < borders, float("-inf"))


def _keep_top_k(logits: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """Drop, in place, what is below the k-th largest logit of its row; ties with it stay."""
    rows = [i for i, p in enumerate(params) if 0 < p.top_k < logits.shape[1]]
    if rows:
        ks = torch.tensor([params[i].top_k for i in rows], device=logits.device).unsqueeze(1)
        selected = logits[rows]
        border = selected.topk(int(ks.max())).values.gather(1, ks - 1)
        logits[rows] = selected.masked_fill_(selected < border, float("-inf"))


def _keep_top_p(probs: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """Keep, in place, the likeliest tokens whose likelier ones sum to under top_p; ties with the last stay."""
    rows = [i for i, p in enumerate(params) if p.top_p < 1.0]
    if rows:
        selected = probs[rows]
        border = _nucleus_border(selected, [params[i].top_p for i in rows])
        probs[rows] = selected.masked_fill_(selected < border, 0.0)


def _nucleus_border(probs: torch.Tensor, top_ps: Sequence[float]) -> torch.Tensor:
    """The smallest probability kept in each row, [num_rows, 1]."""
    top_p = torch.tensor(top_ps, dtype=torch.float64, device=probs.device).unsqueeze(1)
    likeliest = probs.topk(min(_NUCLEUS_CANDIDATES, probs.shape[1])).values
    border = _last_kept(likeliest, top_p)
    flat = (likeliest.sum(dim=-1, dtype=torch.float64) < top_p.squeeze(1)).nonzero().squeeze(1)
    if flat.numel():
        border[flat] = _last_kept(probs[flat].sort(dim=-1, descending=True).values, top_p[flat])
    return border


def _last_kept(likeliest: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """`likeliest` is [num_rows, num_candidates], descending."""
    before = likeliest.cumsum(dim=-1, dtype=torch.float64) - likeliest
    num_kept = (before < top_p).sum(dim=-1, keepdim=True).clamp_(min=1)
    return likeliest.gather(1, num_kept - 1)
