"""Prometheus metrics for what happens thousands of times a second.

They are prometheus_client's without locks and labels at each observation, which cost as much as all else that a router
does for a token; one event loop observes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString


class Histogram(Collector):
    """Of one model."""

    def __init__(
        self, name: str, text: str, model_name: str, buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._text = text
        self._model_name = model_name
        self._bounds = [*map(float, buckets), float("inf")]
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        bounds = map(floatToGoString, self._bounds)
        counts = zip(bounds, map(float, accumulate(self._counts)), strict=True)
        family.add_metric([self._model_name], buckets=[*counts], sum_value=self._sum)
        yield family


class Tally(Collector):
    """A counter of one model."""

    def __init__(self, name: str, text: str, model_name: str, registry: CollectorRegistry) -> None:
        self._name = name
        self._text = text
        self._model_name = model_name
        self._count = 0
        registry.register(self)

    def add(self, count: int) -> None:
        self._count += count

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=["model_name"])
        family.add_metric([self._model_name], float(self._count))
        yield family
