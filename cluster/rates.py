"""How fast workers' counters grow, from several looks at them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from protos.worker_pb2 import WorkerStats

# Statistics come with heartbeats, so that two looks close to each other say little.
_WINDOW_S = 5.0
_LEAST_S = 0.5


class Rates:
    def __init__(self) -> None:
        # By incarnation, the latest looks and when they were.
        self._looks: dict[str, deque[tuple[float, WorkerStats]]] = {}

    def see(self, workers: Iterable[WorkerStats], now_s: float) -> None:
        """All workers; those that are gone are forgotten."""
        seen = {stats.incarnation: stats for stats in workers if stats.incarnation}
        self._looks = {incarnation: self._looks.get(incarnation, deque()) for incarnation in seen}
        for incarnation, looks in self._looks.items():
            looks.append((now_s, seen[incarnation]))
            while len(looks) > 2 and looks[1][0] <= now_s - _WINDOW_S:
                looks.popleft()

    def of(self, incarnation: str, counter: str) -> float | None:
        """A second; None: not known yet."""
        looks = self._looks.get(incarnation)
        if not looks:
            return None
        (then_s, old), (now_s, new) = looks[0], looks[-1]
        if now_s - then_s < _LEAST_S:
            return None
        return float(getattr(new, counter) - getattr(old, counter)) / (now_s - then_s)

    def total(self, counter: str) -> float | None:
        rates = [rate for incarnation in self._looks if (rate := self.of(incarnation, counter)) is not None]
        return sum(rates) if rates else None
