"""Law 2's comparator: two ways of computing give the same token ids, except where rounding alone decides.

Ids must be equal. Where they differ, both candidates are looked up on an fp32 oracle. The difference is a tie when both
lie very near the oracle's choice: in logits when greedy, in the distance of the draw from the token's share of the
distribution when sampled. A tie's token is taken as given, and the rest is judged by what the oracle chooses after it.
Ties are counted over a whole run of comparisons.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from workers.random import uniform
from workers.request import SamplingParams

# Largest distance of a tie: in logits, and in probability.
MAX_LOGIT_GAP = 1e-3
MAX_DRAW_GAP = 1e-4
# A run may have one tie in every so many tokens, begun thousands included.
TOKENS_PER_TIE = 2_000

Logits = np.ndarray[Any, np.dtype[np.float64]]


class Oracle(Protocol):
    def logits(self, token_ids: Sequence[int], num_last: int) -> Logits:
        """Logits [num_last, vocab_size] of what follows each of the last `num_last` tokens, computed in fp32."""


@dataclass(frozen=True, slots=True)
class Tie:
    """Output token `index` is `got` and not `expected`; the farther of them lies `gap` from the oracle's choice."""

    index: int
    expected: int
    got: int
    gap: float
    max_gap: float


class Comparator:
    """One run of comparisons: `require_same` for each answer, `check` at its end."""

    def __init__(self, oracle: Oracle, eos_token_ids: Iterable[int]) -> None:
        self._oracle = oracle
        self._eos_token_ids = frozenset(eos_token_ids)
        self.num_tokens = 0
        self.ties: list[Tie] = []

    def require_same(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        candidate: Sequence[int],
        reference: Sequence[int] | None = None,
        choice: int = 0,
    ) -> None:
        """Raise AssertionError unless `candidate` is the answer to `prompt`: that of `reference`, which another way of
        computing gave, or the oracle's own when there is none. `choice`: which of the request's answers it is."""
        self._require_whole("the answer", candidate, params)
        self.num_tokens += len(candidate)
        first = 0
        if reference is not None:
            self._require_whole("the reference", reference, params)
            first = _num_common(candidate, reference)
            if first == len(candidate):
                return  # Two whole answers, neither of which can go on: they are equal.
        rows = self._oracle.logits([*prompt, *candidate[:-1]], len(candidate) - first)
        for row, index in zip(rows, range(first, len(candidate)), strict=True):
            best = _Choice(row, params, len(prompt) + index, choice)
            expected = reference[index] if reference is not None and index == first else best.token
            self._judge(index, best, candidate[index], expected)

    def check(self) -> None:
        """Raise AssertionError when the run had more ties than rounding explains."""
        allowed = math.ceil(self.num_tokens / TOKENS_PER_TIE)
        assert len(self.ties) <= allowed, f"too many ties: {self.summary()}; {allowed} allowed: {self.ties}"

    def summary(self) -> str:
        return f"{self.num_tokens} tokens compared, {len(self.ties)} ties"

    def _judge(self, index: int, choice: _Choice, got: int, expected: int) -> None:
        if got == expected:
            return
        gap, max_gap = max(choice.gap(got), choice.gap(expected)), choice.max_gap
        assert gap < max_gap, (
            f"output token {index} is {got}, not {expected}: {choice.gap(got):.2g} and {choice.gap(expected):.2g} away "
            f"from the oracle's choice {choice.token}; a tie is under {max_gap:.0e}"
        )
        self.ties.append(Tie(index, expected, got, gap, max_gap))

    def _require_whole(self, what: str, token_ids: Sequence[int], params: SamplingParams) -> None:
        """It ends with the first token that stops it, or with the last of max_tokens."""
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids)}
        stop = next((i for i, token in enumerate(token_ids) if token in stops), None)
        assert params.max_tokens is not None, "a comparison needs max_tokens"
        length = params.max_tokens if stop is None else min(stop + 1, params.max_tokens)
        assert len(token_ids) == length, f"{what} has {len(token_ids)} tokens, not {length}"


class _Choice:
    """What the oracle makes of one row of logits [vocab_size] for the token at `position` of the whole sequence."""

    def __init__(self, logits: Logits, params: SamplingParams, position: int, choice: int = 0) -> None:
        self._logits = np.asarray(logits, dtype=np.float64)
        self._greedy = params.greedy
        if params.greedy:
            self.max_gap = MAX_LOGIT_GAP
            self.token = int(self._logits.argmax())
            return
        self.max_gap = MAX_DRAW_GAP
        assert params.seed is not None, "a comparison of sampled tokens needs their seed"
        self._probs = distribution(self._logits, params)
        self._ends = self._probs.cumsum()
        self._draw = uniform(params.seed, choice, position)
        self.token = int(np.searchsorted(self._ends, self._draw, side="right"))

    def gap(self, token: int) -> float:
        """How far the oracle is from choosing `token`; infinite when no draw would."""
        if not 0 <= token < len(self._logits):
            return math.inf
        if self._greedy:
            return float(self._logits.max() - self._logits[token])
        if not self._probs[token]:
            return math.inf
        end = float(self._ends[token])
        return max(0.0, end - float(self._probs[token]) - self._draw, self._draw - end)


def distribution(logits: Logits, params: SamplingParams) -> Logits:
    """The probabilities [vocab_size] that a token is drawn from, in double precision and by sorting everything."""
    scaled = logits / params.temperature
    if 0 < params.top_k < len(scaled):
        scaled = np.where(scaled >= np.sort(scaled)[-params.top_k], scaled, -np.inf)
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    likeliest = np.sort(probs)[::-1]
    kept = likeliest[likeliest.cumsum() - likeliest < params.top_p]
    probs[probs < kept[-1]] = 0.0
    normalised: Logits = probs / probs.sum()
    return normalised


def _num_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
