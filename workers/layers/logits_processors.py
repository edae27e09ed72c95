"""What changes logits before a token is chosen, each a function of (SamplingParams, tokens so far).

All of it touches few tokens of a row, so it works on cells: parallel arrays of rows, token ids and values.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch

from workers.request import NextToken, SamplingParams, TokensSoFar

Ids = np.ndarray[tuple[int], np.dtype[np.int64]]
Cells = tuple[torch.Tensor, torch.Tensor]


def process_logits(logits: torch.Tensor, samples: Sequence[NextToken], eos_token_ids: Collection[int]) -> None:
    """Apply logit_bias, penalties and min_tokens, in this order and in place, to float32 `logits` [num_rows, vocab]."""
    _add_bias(logits, [one.params for one in samples])
    known = [(row, one.params, one.tokens_so_far) for row, one in enumerate(samples) if one.tokens_so_far is not None]
    assert all(one.tokens_so_far is not None for one in samples if one.params.penalised)
    _penalise_repetition(logits, [one for one in known if one[1].repetition_penalty != 1.0])
    _penalise_output(logits, [one for one in known if one[1].presence_penalty or one[1].frequency_penalty])
    _forbid_stops(logits, known, eos_token_ids)


Known = tuple[int, SamplingParams, TokensSoFar]


def _add_bias(logits: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    rows = [row for row, p in enumerate(params) if p.logit_bias]
    if rows:
        ids = [np.array([token_id for token_id, _ in params[row].logit_bias]) for row in rows]
        cells = _cells(logits, rows, ids)
        bias = [value for row in rows for _, value in params[row].logit_bias]
        _put(logits, cells, logits[cells].double() + _doubles(logits, bias))


def _penalise_repetition(logits: torch.Tensor, known: Sequence[Known]) -> None:
    if not known:
        return
    ids = [np.unique(np.array([*t.prompt_token_ids, *t.output_token_ids], dtype=np.int64)) for _, _, t in known]
    cells = _cells(logits, [row for row, _, _ in known], ids)
    penalties = np.repeat([p.repetition_penalty for _, p, _ in known], [len(one) for one in ids])
    penalty, value = _doubles(logits, penalties), logits[cells].double()
    _put(logits, cells, torch.where(value > 0, value / penalty, value * penalty))


def _penalise_output(logits: torch.Tensor, known: Sequence[Known]) -> None:
    if not known:
        return
    ids, penalties = [], []
    for _, p, tokens in known:
        unique, counts = np.unique(np.array(tokens.output_token_ids, dtype=np.int64), return_counts=True)
        ids.append(unique)
        penalties.append(p.presence_penalty + p.frequency_penalty * counts)
    cells = _cells(logits, [row for row, _, _ in known], ids)
    _put(logits, cells, logits[cells].double() - _doubles(logits, np.concatenate(penalties)))


def _forbid_stops(logits: torch.Tensor, known: Sequence[Known], eos_token_ids: Collection[int]) -> None:
    early = [(row, p) for row, p, tokens in known if len(tokens.output_token_ids) < p.min_tokens]
    if early:
        stops = [np.array([*eos_token_ids, *p.stop_token_ids], dtype=np.int64) for _, p in early]
        ids = [one[one < logits.shape[1]] for one in stops]
        # Finite, so that a row of nothing but stops still has a distribution.
        logits[_cells(logits, [row for row, _ in early], ids)] = torch.finfo(logits.dtype).min


def _cells(logits: torch.Tensor, rows: Sequence[int], ids: Sequence[Ids]) -> Cells:
    """Indices of `ids[i]` in row `rows[i]`."""
    of_each = np.repeat(np.array(rows, dtype=np.int64), [len(one) for one in ids])
    return torch.from_numpy(of_each).to(logits.device), torch.from_numpy(np.concatenate(ids)).to(logits.device)


def _doubles(logits: torch.Tensor, values: Sequence[float] | np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.float64)).to(logits.device)


def _put(logits: torch.Tensor, cells: Cells, values: torch.Tensor) -> None:
    """Whatever a penalty makes of a logit stays a number that float32 has."""
    limits = torch.finfo(logits.dtype)
    logits[cells] = values.clamp_(limits.min, limits.max).to(logits.dtype)
