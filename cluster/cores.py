"""This machine's cores, dealt out among workers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from workers.config import WorkerConfig
from workers.errors import ConfigError


def refuse_missing_cores(workers: Sequence[WorkerConfig], cores: Sequence[int]) -> None:
    """Raises ConfigError for a worker that names others than `cores`."""
    for worker in workers:
        chosen = worker.cpu_affinity
        if isinstance(chosen, tuple) and not (chosen and set(chosen) <= set(cores)):
            raise ConfigError(
                f"cpu_affinity of {worker.name}: {list(chosen)} must be some of this machine's cores {list(cores)}; "
                "or leave it at auto",
                param="cpu_affinity",
            )


def deal_cores(cores: Sequence[int], num_workers: int) -> list[tuple[int, ...]]:
    """Disjoint contiguous shares whose sizes differ by one at most; too few cores: one each, in turn."""
    if num_workers > len(cores):
        return [(cores[i % len(cores)],) for i in range(num_workers)]
    bounds = [i * len(cores) // num_workers for i in range(num_workers + 1)] if num_workers else [0]
    return [tuple(cores[start:end]) for start, end in itertools.pairwise(bounds)]
