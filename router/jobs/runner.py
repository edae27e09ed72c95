"""Jobs: prompts of the queue, a bounded number at a time, through this router like any other request.

A router that dies leaves its leases to run out; then others, or the one that follows it, answer those prompts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Protocol, TypeVar

from router.config import JobsConfig
from router.jobs.queue import JobQueue
from router.jobs.records import Answer, Claim
from router.jobs.room import no_room_error
from router.jobs.tenant import act_for
from router.metrics import RouterMetrics
from router.tenants import KeyRing
from workers.backoff import pause_s
from workers.errors import AbortedError, KVFerryError, LayoutMismatchError, OverloadedError, UnavailableError
from workers.rpc import close_quietly

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Leases are renewed so many times each.
_RENEWALS = 3
# Before a prompt whose workers were not there is tried again, and between two tries at a database that does not answer.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 30.0
# No worker is there, none has room, or no two fit: no try of the prompt's.
_ABSENT = (UnavailableError, OverloadedError, LayoutMismatchError)
# Between two looks for jobs that came to another router.
_LOOK_AGAIN_S = 0.5
_SWEEP_S = 30.0
# Prompts that end within this time are replaced together, with one write to the disk.
_GATHER_S = 0.02


class Answerer(Protocol):
    """Answers prompts of one kind."""

    async def answer(self, claim: Claim) -> Answer:
        """Raises KVFerryError."""

    def failure(self, claim: Claim, error: KVFerryError) -> Answer:
        """The answer that tells of an error."""


class Jobs:
    def __init__(
        self,
        queue: JobQueue,
        answerers: Mapping[str, Answerer],
        config: JobsConfig,
        keys: KeyRing | None,
        metrics: RouterMetrics,
    ) -> None:
        """`answerers`: by kind of job. `keys`: whose tokens answers count for."""
        self._keys = keys
        self._metrics = metrics
        self._queue = queue
        self._answerers = answerers
        self._config = config
        self._woken = asyncio.Event()
        # By (job, index).
        self._running: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._loops: list[asyncio.Task[None]] = []

    @property
    def num_running(self) -> int:
        return len(self._running)

    def start(self) -> None:
        """The database need not be there."""
        sweep_s = min(_SWEEP_S, self._config.ttl_s / 2)
        self._loops = [
            asyncio.create_task(_for_ever(self._claim)),
            asyncio.create_task(_for_ever(partial(self._later, self._renew, self._config.lease_s / _RENEWALS))),
            asyncio.create_task(_for_ever(partial(self._later, self._queue.sweep, sweep_s))),
        ]

    async def stop(self) -> None:
        """What has no answer yet is free for other routers."""
        for task in (*self._loops, *self._running.values()):
            await close_quietly(task)
        try:
            await self._queue.release_all()
        except KVFerryError as error:
            logger.warning("jobs: leases are not given back: %s", error.message)

    def wake(self) -> None:
        """A job has come."""
        self._woken.set()

    def drop(self, job_key: int) -> None:
        """A job has ended: nobody waits for its prompts."""
        for (key, _), task in self._running.items():
            if key == job_key:
                task.cancel()

    async def _claim(self) -> None:
        self._woken.clear()
        room = self._config.max_in_flight - len(self._running)
        claims = await self._surely(partial(self._queue.claim, room)) if room else []
        for claim in claims:
            self._begin(claim)
        if len(claims) < room or not room:
            await self._wait()

    def _begin(self, claim: Claim) -> None:
        # A lease that was lost may be claimed again while the old task still ends.
        if old := self._running.get(claim.key):
            old.cancel()
        task = asyncio.create_task(self._settle(claim), name=claim.request_id)
        self._running[claim.key] = task
        task.add_done_callback(lambda done: self._ended(claim, done))

    def _ended(self, claim: Claim, task: asyncio.Task[None]) -> None:
        if self._running.get(claim.key) is task:
            del self._running[claim.key]
        self._woken.set()
        if not task.cancelled() and (error := task.exception()):
            extra = {"request_id": claim.request_id}
            logger.error("%s: a bug, and its lease runs out: %s", claim.request_id, error, exc_info=error, extra=extra)

    async def _settle(self, claim: Claim) -> None:
        """An answer, be it an error, or the prompt back in the queue."""
        act_for(claim, self._keys)
        answerer, began_s = self._answerers[claim.kind], asyncio.get_running_loop().time()
        try:
            self._refuse_deadly(claim)
            self._require_room(claim)
            answer = await answerer.answer(claim)
        except KVFerryError as error:
            if self._may_pass(claim, error):
                await self._put_back(claim, error)
                return
            answer = answerer.failure(claim, error)
        if await self._surely(lambda: self._queue.answer(claim, answer)):
            self._metrics.job_prompt(answer.failed, asyncio.get_running_loop().time() - began_s)

    def _refuse_deadly(self, claim: Claim) -> None:
        """Whoever tried it before died of it, or of something else."""
        if claim.num_attempts > self._config.max_attempts:
            raise KVFerryError(f"given up after {self._config.max_attempts} tries that no router survived")

    def _require_room(self, claim: Claim) -> None:
        if not claim.has_room:
            raise no_room_error(
                "not answered: your jobs' prompts and answers are over", self._config.max_tenant_job_bytes
            )

    def _may_pass(self, claim: Claim, error: KVFerryError) -> bool:
        """Whether it is the cluster's fault rather than the prompt's, and worth another try."""
        if isinstance(error, _ABSENT):
            return True
        is_ours = error.http_status >= 500 or isinstance(error, AbortedError)
        return is_ours and claim.num_attempts < self._config.max_attempts

    async def _put_back(self, claim: Claim, error: KVFerryError) -> None:
        absent = isinstance(error, _ABSENT)
        wait_s = pause_s(_FIRST_PAUSE_S, claim.num_attempts, claim.request_id, _LONGEST_PAUSE_S)
        if isinstance(error, OverloadedError):
            wait_s = max(wait_s, min(error.retry_after_s, _LONGEST_PAUSE_S))
        extra = {"request_id": claim.request_id}
        logger.warning("%s: tried again in %.1f s: %s", claim.request_id, wait_s, error.message, extra=extra)
        await self._surely(lambda: self._queue.release(claim, wait_s, uncounted=absent))

    async def _renew(self) -> None:
        asked = set(self._running)
        held = await self._queue.renew(asked)
        for key in asked - held:
            if task := self._running.get(key):
                task.cancel()

    async def _later(self, work: Callable[[], Awaitable[None]], wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        await self._surely(work)

    async def _surely(self, work: Callable[[], Awaitable[T]]) -> T:
        """Until the database has done it."""
        num_failed = 0
        while True:
            try:
                return await work()
            except KVFerryError as error:
                num_failed += 1
                wait_s = pause_s(_FIRST_PAUSE_S, num_failed, "jobs", _LONGEST_PAUSE_S)
                logger.warning("jobs: tried again in %.1f s: %s", wait_s, error.message)
                await asyncio.sleep(wait_s)

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(_LOOK_AGAIN_S):
                await self._woken.wait()
                await asyncio.sleep(_GATHER_S)
        except TimeoutError:
            pass


async def _for_ever(turn: Callable[[], Awaitable[None]]) -> None:
    """One turn after the other. A bug ends that turn only: no request shows that jobs stand still."""
    while True:
        try:
            await turn()
        except Exception:
            logger.exception("jobs: a bug; goes on")
            await asyncio.sleep(_LOOK_AGAIN_S)
