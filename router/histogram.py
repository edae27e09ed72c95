"""Prometheus metrics for what happens thousands of times a second.

They are prometheus_client's without locks and labels at each observation, which cost as much as all else that a router
does for a token; one event loop observes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString

from workers.buckets import Buckets


class Histogram(Collector):
    """Of one model."""

    def __init__(
        self, name: str, text: str, model_name: str, buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._text = text
        self._model_name = model_name
        self._buckets = Buckets(buckets)
        self.observe = self._buckets.observe
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        counted = cumulative(self._buckets.bounds, self._buckets.counts)
        family.add_metric([self._model_name], buckets=counted, sum_value=self._buckets.sum)
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


def cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """A histogram's buckets as Prometheus writes them."""
    names = map(floatToGoString, (*bounds, float("inf")))
    return list(zip(names, map(float, accumulate(counts)), strict=True))
