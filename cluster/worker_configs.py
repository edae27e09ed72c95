"""From the config of a cluster to that of each worker: what its role has, and its share of this machine's cores."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Sequence
from typing import Literal

from cluster.config import ClusterConfig
from workers.config import Role, WorkerConfig
from workers.errors import ConfigError


def worker_configs(cluster: ClusterConfig, cores: Sequence[int] | None = None) -> list[WorkerConfig]:
    """One config a worker, prefill first, with this machine's cores dealt out among those that ask for `auto`."""
    drafts = [draft_of(cluster, name, role) for name, role in cluster.worker_roles().items()]
    cores = sorted(os.sched_getaffinity(0)) if cores is None else cores
    if cluster.address is None:
        _refuse_missing_cores(drafts, cores)
    shares = iter(deal_cores(cores, sum(draft.cpu_affinity == "auto" for draft in drafts)))
    return [_pinned(draft, next(shares) if draft.cpu_affinity == "auto" else draft.cpu_affinity) for draft in drafts]


def worker_beside(
    cluster: ClusterConfig, name: str, role: Role, others: Collection[WorkerConfig], cores: Sequence[int] | None = None
) -> WorkerConfig:
    """One more: where it asks for `auto`, it gets the share of the cores that is the last of all workers'. The others
    keep theirs."""
    draft = draft_of(cluster, name, role)
    if draft.cpu_affinity != "auto":
        return _pinned(draft, draft.cpu_affinity)
    cores = sorted(os.sched_getaffinity(0)) if cores is None else cores
    return _pinned(draft, deal_cores(cores, len(others) + 1)[-1])


def draft_of(cluster: ClusterConfig, name: str, role: Role) -> WorkerConfig:
    """Without cores of its own."""
    return WorkerConfig(**{**cluster.worker_settings(role), "name": name})


def _refuse_missing_cores(workers: Sequence[WorkerConfig], cores: Sequence[int]) -> None:
    for worker in workers:
        chosen = worker.cpu_affinity
        if isinstance(chosen, tuple) and not (chosen and set(chosen) <= set(cores)):
            raise ConfigError(
                f"cpu_affinity of {worker.name}: {list(chosen)} must be some of this machine's cores {list(cores)}; "
                "or leave it at auto",
                param="cpu_affinity",
            )


def _pinned(worker: WorkerConfig, affinity: tuple[int, ...] | Literal["none"]) -> WorkerConfig:
    num_threads = worker.num_threads or (None if affinity == "none" else len(affinity))
    return worker.model_copy(update={"cpu_affinity": affinity, "num_threads": num_threads})


def deal_cores(cores: Sequence[int], num_workers: int) -> list[tuple[int, ...]]:
    """Disjoint contiguous shares whose sizes differ by one at most; too few cores: one each, in turn."""
    if num_workers > len(cores):
        return [(cores[i % len(cores)],) for i in range(num_workers)]
    bounds = [i * len(cores) // num_workers for i in range(num_workers + 1)] if num_workers else [0]
    return [tuple(cores[start:end]) for start, end in itertools.pairwise(bounds)]
