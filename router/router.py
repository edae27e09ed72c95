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

from protos import worker_pb2
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
        self._num_attempts = 0
        self.num_running = 0

    @property
    def num_queued(self) -> int:
        return self._admission.num_queued

    async def generate(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, request_id: str, cache_salt: str = ""
    ) -> AsyncGenerator[TokenOutput, None]:
        """Outputs with ascending index; the last has finish_reason and the whole timeline. Closing it aborts.

        The caller has validated params against the model. Raises KVFerryError.
        """
        request = Request(request_id, list(prompt_token_ids), params, router_id=self.incarnation, cache_salt=cache_salt)
        spent = Timeline()
        # Until then it waits for a worker to appear: only a stream that has lost one does.
        give_up_s = 0.0
        for attempt in range(self._config.max_attempts):
            num_tokens = request.num_output_tokens
            try:
                async with aclosing(self._attempt(self._numbered(request), give_up_s)) as outputs:
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
                if request.num_output_tokens > num_tokens:
                    give_up_s = _now() + self._config.worker_wait_s
                await asyncio.sleep(self._config.retry_s * 2**attempt)

    async def stop(self) -> None:
        await asyncio.gather(*self._background, return_exceptions=True)

    def _numbered(self, request: Request) -> Request:
        """The request as workers know it: an id that no other attempt has, so that what comes late for one, an abort or
        an output, never meets another."""
        self._num_attempts += 1
        attempt_id = f"{request.request_id}#{self.incarnation[:8]}.{self._num_attempts}"
        return Request(
            attempt_id,
            request.prompt_token_ids,
            request.params,
            output_token_ids=list(request.output_token_ids),
            router_id=self.incarnation,
            cache_salt=request.cache_salt,
        )

    async def _attempt(self, request: Request, give_up_s: float) -> AsyncGenerator[TokenOutput, None]:
        """One try on one pair of workers, from the request's tokens so far."""
        arrived_s = _now()
        placement = await self._admission.place(request, give_up_s=give_up_s)
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
                output = await self._token_1(request, placement, placement.grant)
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

    async def _token_1(self, request: Request, placement: Placement, grant: worker_pb2.Grant) -> TokenOutput:
        """Raises what ended the hand-off, should the decode worker lose it first."""
        prefill = asyncio.ensure_future(placement.prefill.prefill(request, grant))
        lost = asyncio.ensure_future(placement.decode.lost(request.request_id))
        try:
            await asyncio.wait((prefill, lost), return_when=asyncio.FIRST_COMPLETED)
            if prefill.done():
                return prefill.result()
            raise lost.result()
        finally:
            prefill.cancel()
            lost.cancel()

    def _abort(self, request_id: str, placement: Placement) -> None:
        self._in_background(placement.decode.abort(request_id))
        if placement.prefill is not placement.decode:
            self._in_background(placement.prefill.abort(request_id))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _unseen(output: TokenOutput, request: Request) -> TokenOutput:
    """The output without tokens that are there already. KVFerryError when tokens are missing before it."""
    have = request.num_output_tokens
    if output.index > have:
        raise FrameError(f"{request.request_id}: token {have} is next, {output.index} came")
    seen = have - output.index
    return replace(
        output,
        request_id=request.request_id,
        index=have,
        token_ids=output.token_ids[seen:],
        logprobs=output.logprobs[seen:],
    )


def _now() -> float:
    return asyncio.get_running_loop().time()
