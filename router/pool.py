"""WorkerPool: who is there, in which role, and who is free."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Mapping, Sequence
from typing import NoReturn

from protos import router_pb2
from router.config import RouterConfig
from router.kv_events import follow
from router.prefix_index import PrefixIndex
from router.worker_handle import STOPPING, WorkerHandle
from workers.config import Role
from workers.errors import UnavailableError
from workers.rpc import Network, close_quietly


class WorkerPool:
    def __init__(
        self,
        addresses: Sequence[str] | Mapping[str, Role],
        router_id: str,
        config: RouterConfig,
        network: Network,
    ) -> None:
        """`addresses`: of the workers, each with the role that it is configured with, where that is known."""
        # Set on any change that may make room: those who wait look again, then clear it.
        self.changed = asyncio.Event()
        self.stopping = False
        self._config = config
        roles = addresses if isinstance(addresses, Mapping) else {}
        self._make_handle = functools.partial(WorkerHandle, router_id=router_id, config=config, network=network)
        self.workers = [self._handle(address, roles.get(address)) for address in addresses]
        # Which of them has which KV.
        self.index = PrefixIndex(config.prefix_index_blocks)
        self._followers: list[asyncio.Task[NoReturn]] = []

    async def start(self) -> None:
        await asyncio.gather(*(worker.start() for worker in self.workers))
        self._followers = [asyncio.create_task(follow(worker, self.index)) for worker in self.workers]

    async def move(self, address: str, to: str) -> None:
        """The worker that was at `address` is at another one from now on."""
        at = next((i for i, worker in enumerate(self.workers) if worker.address == address), None)
        if at is None or self.stopping:
            return
        gone, self.workers[at] = self.workers[at], self._handle(to, self.workers[at].configured_role)
        await close_quietly(self._followers[at])
        await gone.stop()
        self._followers[at] = asyncio.create_task(follow(self.workers[at], self.index))
        await self.workers[at].start()

    def _handle(self, address: str, role: Role | None) -> WorkerHandle:
        worker = self._make_handle(address)
        worker.changed = self.changed
        worker.configured_role = role
        return worker

    def refuse(self) -> None:
        """Serve nothing more, and tell whoever waits: the router is about to stop."""
        self.stopping = True
        for worker in self.workers:
            worker.fail_all(UnavailableError(STOPPING))

    async def stop(self) -> None:
        for follower in self._followers:
            await close_quietly(follower)
        await asyncio.gather(*(worker.stop() for worker in self.workers))

    def candidates(self, role: Role) -> list[WorkerHandle]:
        """The workers of a role that can be reached; of decode workers, those that some prefill worker's KV is for."""
        found = [worker for worker in self.workers if worker.role == role and worker.reachable]
        if role != "decode":
            return found
        known = {worker.stats.fingerprint for worker in self.candidates("prefill")}
        return [worker for worker in found if not known or worker.stats.fingerprint in known]

    def whole_role(self) -> Role | None:
        """The role whose workers compute prompt and answer alike; None: prompts are handed over.

        A role is a preference: with no decode worker there, a prefill worker decodes. Raises UnavailableError when
        nobody can serve.
        """
        if not self.stopping:
            if self._has("prefill") and self._has("decode"):
                return None
            if self._has("colocated"):
                return "colocated"
            if self._has("prefill"):
                return "prefill"
        _, reason = self.ready()
        raise UnavailableError(f"{reason}; try again, or see `kvferry status`")

    @property
    def expected_until_s(self) -> float:
        """On the event loop's clock, until when a worker that is gone is expected back or replaced."""
        gone_s = [w.gone_since_s for w in self.workers if w.gone_since_s is not None and not self.stopping]
        return max(gone_s, default=-math.inf) + self._config.worker_wait_s

    def ready(self) -> tuple[bool, str]:
        """Whether a request could be served now, and who is missing."""
        if self.stopping:
            return False, "the router is stopping"
        if self._has("colocated") or (self._has("prefill") and self._has("decode")):
            return True, "; ".join(self._strangers())
        if self._has("prefill"):
            reason = "; ".join(self._strangers()) or "no decode worker answers"
            return True, f"{reason}: prefill workers decode"
        roles: tuple[Role, ...] = ("prefill", "decode")
        missing = [role for role in roles if not self._has(role)]
        refused = [worker.refused for worker in self.workers if worker.refused]
        return False, ": ".join((f"no {' and no '.join(missing)} worker answers", *refused))

    def _strangers(self) -> list[str]:
        """What is wrong with decode workers that cannot take any KV."""
        known = self.candidates("decode")
        return [
            f"{worker.stats.name} computes with other weights or kernels than any prefill worker and gets no requests "
            "(see `kvferry status`)"
            for worker in self.workers
            if worker.role == "decode" and worker.reachable and worker not in known
        ]

    async def audit(self) -> list[router_pb2.WorkerAudit]:
        return await asyncio.gather(*(worker.audit() for worker in self.workers))

    def status(self) -> list[router_pb2.WorkerStatus]:
        return [worker.status() for worker in self.workers]

    @property
    def num_indexed_blocks(self) -> int:
        """Blocks of which it is known who has them."""
        return len(self.index)

    def _has(self, role: Role) -> bool:
        return bool(self.candidates(role))
