"""Who goes next: one queue (router/queue.py), from which a request leaves with its workers chosen.

Requests wait here and not in a prefill worker, which gets the next only while it has under two steps' worth of tokens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from protos import worker_pb2
from router.config import RouterConfig
from router.forecast import Forecast
from router.interference import interference
from router.policy import policy_named
from router.pool import WorkerPool
from router.queue import RequestQueue
from router.ranking import Ranking
from router.worker_handle import WorkerHandle
from workers.config import Role
from workers.errors import DeadlineError, LayoutMismatchError, OverloadedError, UnavailableError
from workers.request import Request

logger = logging.getLogger(__name__)

# Steps' worth of prompt tokens that a prefill worker may have queued.
_MAX_QUEUED_STEPS = 2
# A change elsewhere (another router's request ended) is noticed after this long at the latest.
_LOOK_AGAIN_S = 0.05


@dataclass(slots=True)
class Placement:
    """Where a request goes: `prefill` computes its tokens; `decode` has granted room, unless both are one."""

    prefill: WorkerHandle
    decode: WorkerHandle
    grant: worker_pb2.Grant | None
    # Where `decode` keeps a copy of its KV as it grows; empty: nowhere.
    replica_address: str
    # Of its tokens, those that count as queued at `prefill`: what is cached there does not.
    num_queued_tokens: int
    # All that was queued there when it came, its own among them, and when that was.
    num_tokens_there: int = 0
    placed_s: float = 0.0


class Admission:
    def __init__(self, pool: WorkerPool, config: RouterConfig) -> None:
        self._pool = pool
        self._config = config
        self._ranking = Ranking(pool, policy_named(config.policy))
        self._queue = RequestQueue(config.max_num_queued_reqs, pool.changed)
        self._forecast = Forecast(pool, config.slo)
        self._num_retrying = 0
        # Aborts under way of what may have been granted, by request id and worker: until they are heard, what that
        # worker grants the same request would be aborted with it.
        self._taking_back: dict[tuple[str, str], asyncio.Task[None]] = {}

    @property
    def num_queued(self) -> int:
        return len(self._queue) + self._num_retrying

    async def place(self, request: Request, tried: Collection[str] = ()) -> Placement:
        """Wait for this request's turn and for room. Its tokens count as queued at the prefill worker until `leave`.

        `tried`: addresses of workers where it was placed before, which come last now. It has waited its turn then, and
        goes past the queue, however full that is.

        Raises OverloadedError when the queue is full, the wait too long or an SLO out of reach, UnavailableError when
        no worker is there and LayoutMismatchError when no two can exchange KV, with none expected back.
        """
        try:
            async with asyncio.timeout(self._config.queue_timeout_s):
                return await (self._place_again(request, tried) if tried else self._place_in_turn(request))
        except TimeoutError:
            seconds = self._config.queue_timeout_s
            raise OverloadedError(f"no room within router.queue_timeout_s ({seconds} s); retry later") from None

    async def stop(self) -> None:
        await asyncio.gather(*self._taking_back.values(), return_exceptions=True)

    def token_1(self, placement: Placement) -> None:
        """It is there: the prefill worker's part is done. To say it again is no error."""
        if placement.num_queued_tokens:
            placement.prefill.pace.token_1.add(placement.num_tokens_there, _now() - placement.placed_s, _now())
        self.leave(placement)

    def leave(self, placement: Placement) -> None:
        """Token 1 is there, or will not come. To say it again is no error."""
        if placement.num_queued_tokens:
            placement.prefill.num_queued_tokens -= placement.num_queued_tokens
            placement.num_queued_tokens = 0
            self._pool.changed.set()

    async def _place_in_turn(self, request: Request) -> Placement:
        num_before, arrived_s = self._queue.num_tokens_before(request), _now()
        if not request.output_token_ids:
            self._forecast.require_slo(request, num_before, len(self._queue))
        with self._queue.joined(request) as waiter:
            while True:
                async with self._queue.turn(waiter):
                    placement = await self._look(request, ())
                    if placement is not None:
                        self._queue.served(waiter)
                        if not request.job:
                            self._forecast.waited(num_before, _now() - arrived_s)
                        return placement
                    is_held_back = self._forecast.holds_back(request)
                    if is_held_back and self._queue.hold_back_jobs():
                        continue
                    if not is_held_back:
                        self._queue.refused(waiter)
                    await self._wait_for_change()

    async def _place_again(self, request: Request, tried: Collection[str]) -> Placement:
        self._num_retrying += 1
        try:
            while (placement := await self._look(request, tried)) is None:
                await self._wait_for_change()
            return placement
        finally:
            self._num_retrying -= 1

    async def _look(self, request: Request, tried: Collection[str]) -> Placement | None:
        """None: no room now."""
        self._pool.changed.clear()
        try:
            placement = await self._try(request, tried)
        except (UnavailableError, LayoutMismatchError):
            if _now() >= self._pool.expected_until_s:
                raise
            return None
        if placement is not None:
            self._ranking.num_placed += 1
            placement.prefill.num_queued_tokens += placement.num_queued_tokens
            placement.num_tokens_there, placement.placed_s = placement.prefill.num_queued_tokens, _now()
        return placement

    async def _try(self, request: Request, tried: Collection[str]) -> Placement | None:
        if role := self._pool.whole_role():
            worker = next(self._with_room(role, request, tried, decodes=True), None)
            return None if worker is None else self._whole(request, worker, self._replica_of(request, worker, role))
        unasked = set(self._pool.candidates("decode"))
        for prefill in self._with_room("prefill", request, tried):
            if placement := await self._hand_over(request, tried, prefill, unasked):
                return placement
        return None

    async def _hand_over(
        self, request: Request, tried: Collection[str], prefill: WorkerHandle, unasked: set[WorkerHandle]
    ) -> Placement | None:
        """From this prefill worker to one of the decode workers that were not asked for this request yet."""
        fit = {decode for decode in unasked if not self._pool.pairs.why_not(prefill, decode)}
        for decode in self._ranked("decode", request, tried, [prefill]) if fit else ():
            if decode not in fit:
                continue
            unasked.discard(decode)
            is_aborting = (request.request_id, decode.address) in self._taking_back
            if is_aborting or not self._forecast.may_join(request, decode):
                continue
            replica_address = self._replica_of(request, decode, "decode", prefill)
            num_to_compute = self._num_to_compute(request, prefill)
            with self._asking(request, prefill, decode, num_to_compute):
                grant = await self._reserve(decode, request, replica_address)
            if grant is None:
                continue
            if self._is_short(request, grant, decode, prefill):
                # To submit it there gives the grant back.
                return self._whole(request, decode, replica_address)
            return Placement(prefill, decode, grant, replica_address, num_to_compute)
        return None

    @contextmanager
    def _asking(self, request: Request, prefill: WorkerHandle, decode: WorkerHandle, num_tokens: int) -> Iterator[None]:
        """Until the end of the block it counts as there: others choose their workers meanwhile."""
        num_jobs = len(request.choices) if request.job else 0
        prefill.num_asked_tokens += num_tokens
        decode.num_asked += 1
        decode.num_asked_jobs += num_jobs
        self._ranking.num_placed += 1
        try:
            yield
        finally:
            prefill.num_asked_tokens -= num_tokens
            decode.num_asked -= 1
            decode.num_asked_jobs -= num_jobs
            self._ranking.num_placed -= 1

    def _whole(self, request: Request, worker: WorkerHandle, replica_address: str) -> Placement:
        return Placement(worker, worker, None, replica_address, self._num_to_compute(request, worker))

    def _num_to_compute(self, request: Request, worker: WorkerHandle) -> int:
        (num_cached,) = self._ranking.num_cached_tokens(request, [worker])
        return max(1, request.num_tokens - num_cached)

    def _is_short(self, request: Request, grant: worker_pb2.Grant, decode: WorkerHandle, prefill: WorkerHandle) -> bool:
        """Whether the decode worker had better compute what it lacks than wait for it to be handed over."""
        if decode.stats.quantization != prefill.stats.quantization:
            return False  # Prompts are the prefill worker's, whose weights are others.
        num_missing = request.num_tokens - (0 if request.wants_prompt_logprobs else grant.start)
        if num_missing > self._config.short_prefill_tokens:
            return False
        if decode.address == request.replica_address:
            return True  # It has a copy, without which another computes all anew.
        num_waiting = decode.num_queued_tokens + num_missing
        return interference(num_waiting, decode.stats, prefill.stats) <= self._config.max_interference

    def _replica_of(
        self, request: Request, worker: WorkerHandle, role: Role, otherwise: WorkerHandle | None = None
    ) -> str:
        """Where `worker` is to keep a copy: at the worker that would decode in its place. Empty: nowhere."""
        if not worker.stats.replicates:
            return ""
        others = (w for w in self._ranking.of(role, request, [worker]) if w is not worker)
        heir = next(others, otherwise)
        return heir.address if heir else ""

    async def _reserve(self, decode: WorkerHandle, request: Request, replica_address: str) -> worker_pb2.Grant | None:
        """None: no room there now, or no answer."""
        try:
            return await decode.reserve(request, replica_address)
        except OverloadedError:
            return None
        except (UnavailableError, DeadlineError) as error:
            extra = {"request_id": request.request_id}
            logger.warning("%s: no grant from %s: %s", request.request_id, decode.address, error.message, extra=extra)
        except asyncio.CancelledError:
            self._take_back(decode, request)
            raise
        self._take_back(decode, request)
        return None

    def _take_back(self, decode: WorkerHandle, request: Request) -> None:
        """A grant may have been given whose answer did not come."""
        key = request.request_id, decode.address
        task = self._taking_back[key] = asyncio.get_running_loop().create_task(decode.abort(request.request_id))
        task.add_done_callback(lambda _: self._taking_back.pop(key, None))

    def _with_room(
        self, role: Role, request: Request, tried: Collection[str], *, decodes: bool = False
    ) -> Iterator[WorkerHandle]:
        """Those that have room, the best first: under two steps' worth of tokens to compute. What one has cached of the
        request counts like more of a step, since what does not wait there is computed anew elsewhere. `decodes`: it is
        to decode, too."""
        ranked = self._ranked(role, request, tried, self._pool.candidates("decode"))
        for worker, num_cached in zip(ranked, self._ranking.num_cached_tokens(request, ranked), strict=True):
            if decodes and not self._forecast.may_join(request, worker):
                continue
            num_tokens = worker.num_queued_tokens + worker.num_asked_tokens
            if num_tokens < _MAX_QUEUED_STEPS * (worker.stats.max_num_batched_tokens + num_cached):
                yield worker

    def _ranked(
        self, role: Role, request: Request, tried: Collection[str], others: Sequence[WorkerHandle]
    ) -> list[WorkerHandle]:
        """As the policy says, but the one that has a copy of the request's KV before all, and those that failed behind
        all. `others`: who may have its other half."""
        ranked = self._ranking.of(role, request, others)
        return sorted(ranked, key=lambda worker: (worker.address != request.replica_address, worker.address in tried))

    async def _wait_for_change(self) -> None:
        try:
            async with asyncio.timeout(_LOOK_AGAIN_S):
                await self._pool.changed.wait()
        except TimeoutError:
            pass


def _now() -> float:
    return asyncio.get_running_loop().time()
