"""What a client saw of each request, and what that comes to."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

_SHOWN = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Sample:
    """One request; times are of one clock, in seconds."""

    num_prompt_tokens: int
    # When it was to be sent, and when it was.
    due_s: float
    sent_s: float
    # Of each event that brought tokens.
    arrivals_s: tuple[float, ...] = ()
    num_tokens: int = 0
    # Empty: it was answered.
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.arrivals_s[0] - self.due_s

    @property
    def tpot_s(self) -> float:
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / max(1, self.num_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Between events, however many tokens each brought."""
        return [after - before for before, after in itertools.pairwise(self.arrivals_s)]


@dataclass(frozen=True, slots=True)
class Slo:
    """What makes a request good. TTFT may be longer for longer prompts."""

    ttft_s: float = math.inf
    ttft_per_token_s: float = 0.0
    tpot_s: float = math.inf

    def met(self, sample: Sample) -> bool:
        if sample.error:
            return False
        ttft_s = self.ttft_s + self.ttft_per_token_s * sample.num_prompt_tokens
        return sample.ttft_s <= ttft_s and sample.tpot_s <= self.tpot_s


def summary(samples: Sequence[Sample], wall_s: float, slo: Slo) -> dict[str, Any]:
    """As it is printed. `wall_s`: from the first request to the end of the last answer."""
    answered = [sample for sample in samples if not sample.error]
    num_good = sum(map(slo.met, samples))
    return {
        "n": len(samples),
        "errors": len(samples) - len(answered),
        "first_error": next((sample.error for sample in samples if sample.error), None),
        "wall_s": round(wall_s, 2),
        "in_tok_s": round(sum(sample.num_prompt_tokens for sample in answered) / wall_s, 1),
        "out_tok_s": round(sum(sample.num_tokens for sample in answered) / wall_s, 1),
        "attainment": round(num_good / max(1, len(samples)), 3),
        "goodput_req_s": round(num_good / wall_s, 3),
        "ttft_ms": spread_ms(sample.ttft_s for sample in answered),
        "tpot_ms": spread_ms(sample.tpot_s for sample in answered),
        "itl_ms": spread_ms(itl_s for sample in answered for itl_s in sample.itl_s),
        # How late the meter was itself: where this is not small, it measured itself.
        "sent_late_ms": spread_ms(sample.sent_s - sample.due_s for sample in samples),
    }


def spread_ms(values_s: Iterable[float]) -> dict[str, float]:
    """Percentiles and the maximum; empty where there is nothing."""
    values = sorted(values_s)
    if not values:
        return {}
    cuts = statistics.quantiles(values * 2 if len(values) == 1 else values, n=100, method="inclusive")
    return {**{f"p{q}": round(1000 * cuts[q - 1], 2) for q in _SHOWN}, "max": round(1000 * values[-1], 2)}
