"""A Prometheus histogram for what happens thousands of times a second."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString


class Histogram(Collector):
    """Of one model. It is prometheus_client's without locks and labels at each observation, which cost as much as all
    else that a router does for a token; one event loop observes."""

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
