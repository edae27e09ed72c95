"""Refusing, before any work, what would miss its SLO: prediction.py over what the pool is at now."""

from __future__ import annotations

import asyncio

from router.config import SloConfig
from router.pool import WorkerPool
from router.prediction import DecodeLoad, Fit, PrefillLoad, tpot_s, ttft_s
from router.worker_handle import WorkerHandle
from workers.config import Role
from workers.errors import LayoutMismatchError, OverloadedError, UnavailableError
from workers.request import Request, Slo

# After so long at the latest it is worth asking again.
_MAX_RETRY_AFTER_S = 60.0


class Forecast:
    def __init__(self, pool: WorkerPool, slo: SloConfig) -> None:
        self._pool = pool
        self._slo = slo
        # Seconds in the queue over tokens that were before it.
        self._wait = Fit()

    def waited(self, num_tokens_before: int, seconds: float) -> None:
        """A request has left the queue with its workers."""
        self._wait.add(num_tokens_before, seconds, _now())

    def require_slo(self, request: Request, num_tokens_before: int, num_queued: int) -> None:
        """Raises OverloadedError when it is predicted to miss one. A job's prompt has none."""
        if request.job:
            return
        own = request.slo or Slo()
        if limit_ms := own.ttft_ms or self._slo.ttft_ms:
            predicted_s = self.ttft_s(request, num_tokens_before, num_queued)
            # By then what is ahead of it has become so much less.
            _require("ttft_ms", limit_ms, predicted_s, (predicted_s or 0.0) - limit_ms / 1000)
        if limit_ms := own.tpot_ms or self._slo.tpot_ms:
            predicted_s = self.tpot_s(request)
            _require("tpot_ms", limit_ms, predicted_s, self._until_an_end_s(request, predicted_s or 0.0))

    def ttft_s(self, request: Request, num_tokens_before: int, num_queued: int) -> float | None:
        """Seconds to token 1 behind so many tokens of so many requests in the queue. None: not known."""
        loads = [_prefill_load(worker) for worker in self._workers("prefill")]
        wait = self._wait.line(_now()) if num_queued else None
        return ttft_s(request.num_tokens, num_tokens_before, loads, wait)

    def tpot_s(self, request: Request) -> float | None:
        """Seconds a token, all its answers among the running ones. None: not known."""
        return tpot_s(len(request.choices), [_decode_load(worker) for worker in self._workers("decode")])

    def may_join(self, request: Request, worker: WorkerHandle) -> bool:
        """Whether `worker` may decode it now. A job's prompt may not where the answers that run would then miss
        router.slo; but one of them may always, so that jobs go on under any load."""
        if not request.job or self._slo.tpot_ms is None or not worker.num_jobs:
            return True
        line, num_running = worker.pace.step.line(_now()), _num_running(worker)
        return line is None or line.at(num_running + len(request.choices)) <= self._slo.tpot_ms / 1000

    def holds_back(self, request: Request) -> bool:
        """Whether some worker may not decode it now, for whatever room it has."""
        return request.job and not all(self.may_join(request, worker) for worker in self._workers("decode"))

    def _until_an_end_s(self, request: Request, tpot_s: float) -> float:
        """Until some running answer is over, if all are as long as this one may become."""
        num_running = sum(_decode_load(worker).num_running for worker in self._workers("decode"))
        return (request.params.max_tokens or 0) * tpot_s / max(num_running, 1)

    def _workers(self, role: Role) -> list[WorkerHandle]:
        try:
            role = self._pool.whole_role() or role
        except (UnavailableError, LayoutMismatchError):
            return []
        return self._pool.candidates(role)


def _prefill_load(worker: WorkerHandle) -> PrefillLoad:
    return PrefillLoad(worker.num_queued_tokens, worker.pace.token_1.line(_now()))


def _decode_load(worker: WorkerHandle) -> DecodeLoad:
    # Jobs make room (may_join): no request is refused for them.
    return DecodeLoad(max(0, _num_running(worker) - worker.num_jobs), worker.pace.step.line(_now()))


def _num_running(worker: WorkerHandle) -> int:
    # This router's own count is exact; the worker's has those of other routers, and is up to a heartbeat old.
    return max(worker.num_requests, worker.stats.num_running)


def _require(name: str, limit_ms: float, predicted_s: float | None, retry_after_s: float) -> None:
    if predicted_s is not None and predicted_s > limit_ms / 1000:
        raise OverloadedError(
            f"slo.{name} is {limit_ms:g}, and about {predicted_s * 1000:.0f} ms are to be expected now; retry "
            "later, or ask for less",
            param="slo",
            code="slo_unattainable",
            retry_after_s=min(retry_after_s, _MAX_RETRY_AFTER_S),
        )


def _now() -> float:
    return asyncio.get_running_loop().time()
