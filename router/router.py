"""Router: token ids in, token outputs out, whatever happens to the workers in between.

A request is its tokens, so a retry is the same request with the tokens that are there already: a stream that breaks
goes on from its next index on other workers, and the client sees each token once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from router.admission import Admission, Placement
from router.config import RouterConfig
from router.pool import WorkerPool
from workers.errors import (
    AbortedError,
    DeadlineError,
    FrameError,
    StaleGrantError,
    UnavailableError,
)
from workers.request import Request, SamplingParams, Timeline, TokenOutput

logger = logging.getLogger(__name__)

# What another attempt may mend: the worker, its connection or the hand-off was at fault, not the request.
_RETRYABLE = (UnavailableError, StaleGrantError, FrameError, DeadlineError, AbortedError)


class Router:
    """Lives on one event loop; `generate` may run any number of times at once."""

    def __init__(self, pool: WorkerPool, config: RouterConfig, incarnation: str) -> None:
        self.incarnation = incarnation
        self._pool = pool
        self._config = config
        self._admission = Admission(pool, config)
        self._background: set[asyncio.Task[None]] = set()
        self.num_running = 0

    @property
    def num_queued(self) -> int:
        return self._admission.num_queued

    async def generate(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, request_id: str
    ) -> AsyncGenerator[TokenOutput, None]:
        """Outputs with ascending index; the last has finish_reason and the whole timeline. Closing it aborts.

        The caller has validated params against the model. Raises KVFerryError.
        """
        request = Request(request_id, list(prompt_token_ids), params, router_id=self.incarnation)
        spent = Timeline()
        for attempt in range(self._config.max_attempts):
            try:
                async with aclosing(self._attempt(_named(request, attempt))) as outputs:
                    async for output in outputs:
                        new = _unseen(output, request)
                        request.output_token_ids.extend(new.token_ids)
                        spent += output.timeline or Timeline()
                        yield replace(new, timeline=spent) if new.finish_reason else new
                return
            except _RETRYABLE as error:
                if attempt + 1 == self._config.max_attempts:
                    raise
                logger.warning(
                    "%s: attempt %d ended after %d tokens: %s",
                    request_id, attempt + 1, request.num_output_tokens, error.message,
                )  # fmt: skip
                await asyncio.sleep(self._config.retry_s * 2**attempt)

    async def stop(self) -> None:
        await asyncio.gather(*self._background, return_exceptions=True)

    async def _attempt(self, request: Request) -> AsyncGenerator[TokenOutput, None]:
        """One try on one pair of workers, from the request's tokens so far."""
        arrived_s = _now()
        placement = await self._admission.place(request)
        queued = Timeline(queued_s=_now() - arrived_s)
        finished = False
        placement.decode.expect(request.request_id)
        self.num_running += 1
        try:
            async with aclosing(self._run(request, placement)) as outputs:
                async for output in outputs:
                    finished = output.finish_reason is not None
                    timeline = queued + (output.timeline or Timeline())
                    queued = Timeline()
                    yield replace(output, timeline=timeline)
        finally:
            self.num_running -= 1
            placement.decode.forget(request.request_id)
            if not finished:
                self._abort(request.request_id, placement)

    async def _run(self, request: Request, placement: Placement) -> AsyncGenerator[TokenOutput, None]:
        try:
            if placement.grant is None:
                await placement.decode.submit(request)
            else:
                output = await placement.prefill.prefill(request, placement.grant)
                self._admission.leave(placement)
                yield output
                if output.finish_reason is not None:
                    return
            async with aclosing(placement.decode.outputs(request.request_id)) as outputs:
                async for output in outputs:
                    self._admission.leave(placement)
                    yield output
        finally:
            self._admission.leave(placement)

    def _abort(self, request_id: str, placement: Placement) -> None:
        for worker in {placement.prefill, placement.decode}:
            self._in_background(worker.abort(request_id))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _named(request: Request, attempt: int) -> Request:
    """The request as workers know it: each attempt by another id, so that an abort or a failure of an earlier one that
    is still under way does not end this one. Its tokens stay shared."""
    return replace(request, request_id=f"{request.request_id}#{attempt + 1}") if attempt else request


def _unseen(output: TokenOutput, request: Request) -> TokenOutput:
    """The output without tokens that are there already. KVFerryError when tokens are missing before it."""
    have = request.num_output_tokens
    if output.index > have:
        raise FrameError(f"{request.request_id}: token {have} is next, {output.index} came")
    new = output.token_ids[have - output.index :]
    return replace(output, request_id=request.request_id, index=have, token_ids=new)


def _now() -> float:
    return asyncio.get_running_loop().time()
