"""WorkerPool: who is there, in which role, and who is free."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import Mapping, Sequence
from typing import NoReturn

from protos import router_pb2
from router.config import RouterConfig
from router.kv_events import follow
from router.pairs import Pairs
from router.prefix_index import PrefixIndex
from router.roles import Member
from router.worker_handle import STOPPING, WorkerHandle
from workers.config import Role
from workers.errors import LayoutMismatchError, UnavailableError
from workers.rpc import Network, close_quietly

logger = logging.getLogger(__name__)


class WorkerPool:
    def __init__(
        self,
        addresses: Sequence[str] | Mapping[str, Member],
        router_id: str,
        config: RouterConfig,
        network: Network,
    ) -> None:
        """`addresses`: of the workers, each with what it should be, where that is known."""
        # Set on any change that may make room: those who wait look again, then clear it.
        self.changed = asyncio.Event()
        self.stopping = False
        self._config = config
        self._make_handle = functools.partial(WorkerHandle, router_id=router_id, config=config, network=network)
        self.workers = [self._handle(address) for address in addresses]
        if isinstance(addresses, Mapping):
            for worker in self.workers:
                worker.member = addresses[worker.address]
        # Which of them has which KV.
        self.index = PrefixIndex(config.prefix_index_blocks)
        self.pairs = Pairs(self.workers)
        self._followers: dict[WorkerHandle, asyncio.Task[NoReturn]] = {}
        self._introducer: asyncio.Task[NoReturn] | None = None
        # One after the other.
        self._changing = asyncio.Lock()

    async def start(self) -> None:
        await self._join(self.workers)
        await self.pairs.ask()
        self._introducer = asyncio.create_task(self._introduce())

    async def set_workers(self, members: Mapping[str, Member]) -> None:
        """These are the cluster's, by their addresses, and no others. What one that is gone had at work goes on at
        another. Returns when those that are new answer, or have had time to."""
        async with self._changing:
            if self.stopping:
                return
            present = {worker.address: worker for worker in self.workers}
            joining = [self._handle(address) for address in members if address not in present]
            by_address = present | {worker.address: worker for worker in joining}
            self.workers[:] = [by_address[address] for address in members]
            for worker in self.workers:
                worker.member = members[worker.address]
            self.changed.set()
            for address in present.keys() - members.keys():
                await self._leave(present[address])
            if not self.stopping:
                await self._join(joining)

    async def _leave(self, worker: WorkerHandle) -> None:
        worker.fail_all(UnavailableError(f"worker {worker.name} has left the cluster"))
        await close_quietly(self._followers.pop(worker, None))
        await worker.stop()

    async def _join(self, workers: Sequence[WorkerHandle]) -> None:
        await asyncio.gather(*(worker.start() for worker in workers))
        self._followers |= {worker: asyncio.create_task(follow(worker, self.index)) for worker in workers}

    def _handle(self, address: str) -> WorkerHandle:
        worker = self._make_handle(address)
        worker.changed = self.changed
        return worker

    def refuse(self) -> None:
        """Serve nothing more, and tell whoever waits: the router is about to stop."""
        self.stopping = True
        for worker in self.workers:
            worker.fail_all(UnavailableError(STOPPING))

    async def stop(self) -> None:
        for task in (*self._followers.values(), self._introducer):
            await close_quietly(task)
        await asyncio.gather(*(worker.stop() for worker in self.workers))

    def candidates(self, role: Role) -> list[WorkerHandle]:
        """The workers of a role that can be reached and have somebody to exchange KV with, or nobody to do it for."""
        found = self._reachable(role)
        why_not = self.pairs.why_not
        if role == "prefill" and (decodes := self._reachable("decode")):
            return [worker for worker in found if any(not why_not(worker, decode) for decode in decodes)]
        if role == "decode" and (prefills := self._reachable("prefill")):
            return [worker for worker in found if any(not why_not(prefill, worker) for prefill in prefills)]
        return found

    def whole_role(self) -> Role | None:
        """The role whose workers compute prompt and answer alike; None: prompts are handed over.

        A role is a preference: with no decode worker there, a prefill worker decodes. Raises UnavailableError when
        nobody is there to serve, LayoutMismatchError when no two that are there can exchange KV.
        """
        if not self.stopping:
            if self._has("prefill") and self._has("decode"):
                return None
            if self._has("colocated"):
                return "colocated"
            if self._has("prefill"):
                return "prefill"
        _, reason = self.ready()
        if not self.stopping and self._reachable("prefill"):
            raise LayoutMismatchError(reason)
        raise UnavailableError(f"{reason}; try again, or see `kvferry status`")

    @property
    def expected_until_s(self) -> float:
        """On the event loop's clock, until when a worker that is gone, or about to go, is expected back or replaced."""
        now_s = asyncio.get_running_loop().time()
        gone_s = (now_s if w.member.draining else w.gone_since_s for w in self.workers)
        last_s = max((at for at in gone_s if at is not None and not self.stopping), default=-math.inf)
        return last_s + self._config.worker_wait_s

    def ready(self) -> tuple[bool, str]:
        """Whether a request could be served now, and who is missing."""
        if self.stopping:
            return False, "the router is stopping"
        if self._has("colocated") or (self._has("prefill") and self._has("decode")):
            return True, "; ".join(self._alone().values())
        if self._has("prefill"):
            return True, "no decode worker answers: prefill workers decode"
        if prefills := self._reachable("prefill"):
            reasons = [self.pairs.why_not(prefills[0], decode) for decode in self._reachable("decode")]
            return False, f"no decode worker can take a prefill worker's KV: {reasons[0]}"
        roles: tuple[Role, ...] = ("prefill", "decode")
        missing = [role for role in roles if not self._has(role)]
        refused = [worker.refused for worker in self.workers if worker.refused]
        return False, ": ".join((f"no {' and no '.join(missing)} worker answers", *refused))

    def _alone(self) -> dict[WorkerHandle, str]:
        """Who answers and gets no requests, since nobody can exchange KV with it, and why."""
        found = {}
        roles: tuple[Role, ...] = ("prefill", "decode")
        for role in roles:
            others = set(self.candidates(role))
            for worker in self._reachable(role):
                if worker not in others:
                    found[worker] = f"{worker.name} gets no requests: {self._unfit(worker)[0]}"
        return found

    def _unfit(self, worker: WorkerHandle) -> list[str]:
        """Why it cannot exchange KV with those of the other role with which it cannot."""
        if worker.role == "prefill":
            reasons = [self.pairs.why_not(worker, decode) for decode in self._reachable("decode")]
        else:
            reasons = [self.pairs.why_not(prefill, worker) for prefill in self._reachable("prefill")]
        return list(filter(None, reasons))

    async def audit(self) -> list[router_pb2.WorkerAudit]:
        return await asyncio.gather(*(worker.audit() for worker in self.workers))

    def status(self) -> list[router_pb2.WorkerStatus]:
        found, alone = [], self._alone()
        for worker in self.workers:
            status = worker.status()
            status.draining = worker.member.draining
            status.refused = status.refused or alone.get(worker, "")
            if worker.role == "prefill" and worker.reachable:
                status.unfit.extend(self._unfit(worker))
            found.append(status)
        return found

    @property
    def num_indexed_blocks(self) -> int:
        """Blocks of which it is known who has them."""
        return len(self.index)

    def _reachable(self, role: Role) -> list[WorkerHandle]:
        """Those that may get requests."""
        return [w for w in self.workers if w.role == role and w.reachable and not w.member.draining]

    async def _introduce(self) -> NoReturn:
        """Workers that come to each other."""
        while True:
            await asyncio.sleep(self._config.heartbeat_s)
            try:
                await self.pairs.ask()
            except Exception:  # Nobody else would.
                logger.exception("workers could not be let connect")

    def _has(self, role: Role) -> bool:
        return bool(self.candidates(role))
