"""From what the router knows to what its policy sees: the workers of a role, in the order in which they are tried."""

from __future__ import annotations

from collections.abc import Sequence

from protos.worker_pb2 import WorkerStats
from router.policies.load import Load, ToPlace
from router.policy import RoutingPolicy
from router.pool import WorkerPool
from router.worker_handle import WorkerHandle
from workers.config import Role
from workers.engine.block_hash import BlockHash
from workers.request import Request


class Ranking:
    def __init__(self, pool: WorkerPool, policy: RoutingPolicy) -> None:
        self._pool = pool
        self._policy = policy
        # Requests that have been placed.
        self.num_placed = 0

    def of(self, role: Role, request: Request, others: Sequence[WorkerHandle]) -> list[WorkerHandle]:
        """The workers of `role` that answer, the policy's choice first. `others`: who may have the request's other
        half."""
        candidates = self._pool.candidates(role)
        cached = self.num_cached_tokens(request, candidates)
        loads = [_load(worker, tokens, others) for worker, tokens in zip(candidates, cached, strict=True)]
        to_place = ToPlace(role, request.request_id, request.num_tokens, self.num_placed)
        return [candidates[i] for i in self._policy(loads, to_place)]

    def num_cached_tokens(self, request: Request, workers: Sequence[WorkerHandle]) -> list[int]:
        """How many of the request's first tokens need not be computed at each worker, or not be sent there."""
        caching = [worker.stats for worker in workers if worker.stats.hash_block_size]
        if not caching or not len(self._pool.index):
            return [0] * len(workers)
        unit = caching[0].hash_block_size
        names = BlockHash(caching[0].fingerprint, unit)
        hashes = (names.of_unit(request, i) for i in range(request.num_tokens // unit))
        found = self._pool.index.match(hashes, {stats.incarnation: stats.block_size // unit for stats in caching})
        return [found.get(worker.stats.incarnation, 0) * unit for worker in workers]


def _load(worker: WorkerHandle, num_cached_tokens: int, others: Sequence[WorkerHandle]) -> Load:
    return Load(
        worker.num_queued_tokens + worker.num_asked_tokens,
        worker.num_requests,
        worker.stats.blocks_free + worker.stats.blocks_cached,
        num_cached_tokens,
        any(share_host(worker.stats, other.stats) for other in others),
    )


def share_host(one: WorkerStats, other: WorkerStats) -> bool:
    """Whether KV goes from one to the other through memory: as they tell, or as their nodes' names let expect."""
    for stats, peer in ((one, other), (other, one)):
        for known in stats.peers:
            if known.incarnation == peer.incarnation:
                return known.transport in ("shm", "local")
    return one.node == other.node
