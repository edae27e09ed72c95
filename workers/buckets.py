"""How often values of each size were seen: what a Prometheus histogram is made of."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from protos import worker_pb2 as pb


class Buckets:
    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: ascending; a value belongs to the first that is not below it."""
        self.bounds = [*map(float, bounds)]
        # The last is of values above all bounds.
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def to_proto(self) -> pb.Buckets:
        return pb.Buckets(bounds=self.bounds, counts=self.counts, sum=self.sum)
