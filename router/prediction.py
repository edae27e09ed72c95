"""How soon a request would get its tokens, before any work is done for it.

Measured times are fitted by lines: to token 1 over the tokens that a prefill worker has queued, of a decode worker's
step over the requests in it, and of the wait in the queue over the tokens ahead. What happened lately counts most, and
what was measured too seldom predicts nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from protos.worker_pb2 import WorkerStats

# A sample counts half as much after so long, and so many fresh ones are the fewest that say anything.
_HALF_LIFE_S = 15.0
_MIN_WEIGHT = 3.0


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds: base_s + slope_s * x, neither negative."""

    base_s: float
    slope_s: float

    def at(self, x: float) -> float:
        return self.base_s + self.slope_s * x


class Fit:
    """Weighted least squares of seconds over x, from decayed sums."""

    def __init__(self) -> None:
        self._at_s = 0.0
        # Of weights, x, seconds, x * x and x * seconds.
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)

    def add(self, x: float, seconds: float, now_s: float) -> None:
        sample = (1.0, x, seconds, x * x, x * seconds)
        self._sums = tuple(old + new for old, new in zip(self._decayed(now_s), sample, strict=True))  # type: ignore[assignment]
        self._at_s = now_s

    def line(self, now_s: float) -> Line | None:
        """None: too few samples of late."""
        weight, x, seconds, xx, xs = self._decayed(now_s)
        if weight < _MIN_WEIGHT:
            return None
        spread = weight * xx - x * x
        if spread <= 1e-6 * weight * xx:
            # All alike: one more token costs what each did, for all that is known.
            return Line(0.0, seconds / x) if x else Line(seconds / weight, 0.0)
        slope = (weight * xs - x * seconds) / spread
        base = (seconds - slope * x) / weight
        if slope < 0:
            return Line(seconds / weight, 0.0)
        return Line(base, slope) if base >= 0 else Line(0.0, xs / xx)

    def _decayed(self, now_s: float) -> tuple[float, float, float, float, float]:
        factor = 0.5 ** ((now_s - self._at_s) / _HALF_LIFE_S)
        weight, x, seconds, xx, xs = self._sums
        return weight * factor, x * factor, seconds * factor, xx * factor, xs * factor


class Pace:
    """How fast one worker is."""

    def __init__(self) -> None:
        # Seconds to token 1 over tokens queued there, the request's own among them.
        self.token_1 = Fit()
        # Seconds of a step over requests in it.
        self.step = Fit()

    def saw_stats(self, before: WorkerStats, after: WorkerStats, now_s: float) -> None:
        """Two looks at one incarnation, one after the other."""
        num_steps = after.num_steps - before.num_steps
        # In decode a step gives every request a token.
        num_tokens = after.num_output_tokens - before.num_output_tokens
        if num_steps > 0 and num_tokens > 0:
            self.step.add(num_tokens / num_steps, (after.steps_s - before.steps_s) / num_steps, now_s)


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    num_queued_tokens: int
    token_1: Line | None


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    num_running: int
    step: Line | None


def ttft_s(num_tokens: int, num_tokens_before: int, prefill: Sequence[PrefillLoad], wait: Line | None) -> float | None:
    """Seconds to token 1 of a request of so many tokens behind so many in the queue. None: not known.

    `wait`: what the queue has cost lately, for whatever reason; None: nobody waits.
    """
    lines = [(load, load.token_1) for load in prefill if load.token_1 is not None]
    if not lines or len(lines) < len(prefill):
        return None
    rate = sum(1 / line.slope_s if line.slope_s else math.inf for _, line in lines)
    waited_s = max(num_tokens_before / rate, wait.at(num_tokens_before) if wait else 0.0)
    return waited_s + min(line.at(load.num_queued_tokens + num_tokens) for load, line in lines)


def tpot_s(num_choices: int, decode: Iterable[DecodeLoad]) -> float | None:
    """Seconds a token with so many answers more in the best running batch. None: not known."""
    times_s = [load.step.at(load.num_running + num_choices) if load.step else None for load in decode]
    return None if None in times_s or not times_s else min(time_s for time_s in times_s if time_s is not None)
