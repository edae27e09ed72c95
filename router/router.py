"""Router: token ids in, token outputs out, whatever happens to the workers in between.

A request is its tokens, so a retry is the same request with the tokens that are there already: a stream that breaks
goes on from its next index on other workers, and the client sees each token once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from protos import router_pb2, worker_pb2
from router.admission import Admission, Placement
from router.config import RouterConfig
from router.merge import merge
from router.pool import WorkerPool
from workers.backoff import pause_s
from workers.engine.choices import children_of
from workers.errors import (
    AbortedError,
    DeadlineError,
    FrameError,
    StaleGrantError,
    UnavailableError,
)
from workers.request import NO_TERMS, Request, SamplingParams, Terms, Timeline, TokenOutput

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
        # Those under way, by their ids on the workers.
        self._attempts: dict[str, Placement] = {}

    @property
    def num_queued(self) -> int:
        return self._admission.num_queued

    @property
    def num_running(self) -> int:
        return len(self._attempts)

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str,
        cache_salt: str = "",
        so_far: Mapping[int, Sequence[int]] | None = None,
        terms: Terms = NO_TERMS,
    ) -> AsyncGenerator[TokenOutput, None]:
        """Outputs of all choices: of each with ascending index, the last with finish_reason and its whole timeline.

        `so_far`: by choice, the tokens that are there already, and no choices but these. Closing it aborts all. The
        caller has validated params against the model. Raises KVFerryError.
        """
        request = Request(
            request_id,
            list(prompt_token_ids),
            params,
            router_id=self.incarnation,
            cache_salt=cache_salt,
            tenant=terms.tenant,
            priority=terms.priority,
            slo=terms.slo,
        )
        choices = [_Choice(one) for one in (children_of(request) if params.n > 1 else [request])]
        if so_far is not None:
            choices = [choice for choice in choices if choice.request.choice in so_far]
            for choice in choices:
                choice.request.output_token_ids.extend(so_far[choice.request.choice])
        return self._answer(request, choices)

    async def _answer(
        self, request: Request, choices: Sequence[_Choice], num_failed: int = 0, tried: Iterable[str] = ()
    ) -> AsyncGenerator[TokenOutput, None]:
        """All that is still to come of `choices`, of those that `request` asks for, after so many failures in a row, at
        workers of the addresses `tried`."""
        tried = set(tried)
        by_index = {choice.request.choice: choice for choice in choices}
        while _are_one(request, choices):
            num_tokens = _num_tokens(choices)
            numbered = self._numbered(request)
            try:
                async with aclosing(self._attempt(numbered, tried)) as outputs:
                    async for output in outputs:
                        yield by_index[output.choice].take(output)
                return
            except _RETRYABLE as error:
                # Whoever gets on is not counted out: streams may outlive any number of workers. Prefill's token is no
                # getting on: a request that kills whoever decodes it has it, too.
                got_on = _num_tokens(choices) > num_tokens + len(choices)
                num_failed = 1 if got_on else num_failed + 1
                logger.warning(
                    "%s: try %d ended after %d tokens: %s",
                    request.request_id, num_failed, _num_tokens(choices), error.message,
                )  # fmt: skip
                if got_on:
                    for choice in choices:
                        choice.request.replica_address = numbered.replica_address
                if num_failed >= self._config.max_attempts or self._pool.stopping:
                    raise
                key = f"{request.request_id} {request.choice}"
                await asyncio.sleep(pause_s(self._config.retry_s, num_failed, key))
        rest = [self._answer(one.request, [one], num_failed, tried) for one in choices if not one.finished]
        async with aclosing(merge(rest)) as merged:
            async for _, output in merged:
                yield output

    async def audit(self) -> router_pb2.AuditRouterResponse:
        """Which blocks the workers say they own for whom, and what this router waits for."""
        workers = await self._pool.audit()
        attempts = [
            router_pb2.Attempt(
                request_id=request_id,
                prefill_address=placement.prefill.address,
                decode_address=placement.decode.address,
            )
            for request_id, placement in self._attempts.items()
        ]
        return router_pb2.AuditRouterResponse(incarnation=self.incarnation, workers=workers, attempts=attempts)

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
            choice=request.choice,
            replica_address=request.replica_address,
            tenant=request.tenant,
            priority=request.priority,
            slo=request.slo,
        )

    async def _attempt(self, request: Request, tried: set[str]) -> AsyncGenerator[TokenOutput, None]:
        """One try on one pair of workers, from the request's tokens so far; adds to `tried` who may be
        at fault if it fails."""
        arrived_s = _now()
        placement = await self._admission.place(request, tried)
        tried |= {placement.prefill.address, placement.decode.address}
        queued_s = _now() - arrived_s
        request.replica_address = placement.replica_address
        heard: set[int] = set()
        running = set(request.choices)
        placement.decode.expect(request.request_id)
        self._attempts[request.request_id] = placement
        try:
            async with aclosing(self._run(request, placement)) as outputs:
                async for output in outputs:
                    if placement.grant is not None:
                        tried.discard(placement.prefill.address)  # It has done its part.
                    if output.finish_reason is not None:
                        running.remove(output.choice)
                    queued = Timeline(queued_s=0.0 if output.choice in heard else queued_s)
                    heard.add(output.choice)
                    yield replace(output, timeline=queued + (output.timeline or Timeline()))
        finally:
            del self._attempts[request.request_id]
            placement.decode.forget(request.request_id)
            if running:
                self._abort(request.request_id, placement)

    async def _run(self, request: Request, placement: Placement) -> AsyncGenerator[TokenOutput, None]:
        running = set(request.choices)
        try:
            if placement.grant is None:
                await placement.decode.submit(request)
            else:
                first = await self._token_1(request, placement, placement.grant)
                self._admission.token_1(placement)
                for output in first:
                    if output.finish_reason is not None:
                        running.remove(output.choice)
                    yield output
            async with aclosing(placement.decode.outputs(request.request_id, running)) as outputs:
                if placement.grant is not None and running:
                    # Until decode has answered, prefill may take the end of the hand-off with it when it dies.
                    yield await placement.prefill.unless_lost(anext(outputs))
                async for output in outputs:
                    self._admission.token_1(placement)
                    yield output
        finally:
            self._admission.leave(placement)

    async def _token_1(self, request: Request, placement: Placement, grant: worker_pb2.Grant) -> list[TokenOutput]:
        """Of every choice. Raises what ended the hand-off, should the decode worker lose it first."""
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


@dataclass(slots=True)
class _Choice:
    """One answer as far as the client has it."""

    request: Request
    spent: Timeline = field(default_factory=Timeline)
    finished: bool = False

    def take(self, output: TokenOutput) -> TokenOutput:
        """What of it is new; with the last, the whole timeline."""
        new = _unseen(output, self.request)
        self.request.output_token_ids.extend(new.token_ids)
        self.spent += output.timeline or Timeline()
        self.finished = new.finish_reason is not None
        return replace(new, timeline=self.spent) if self.finished else new


def _are_one(request: Request, choices: Sequence[_Choice]) -> bool:
    """Whether an attempt at `request` goes on with all of them. Once several have begun, each goes on alone."""
    return len(choices) == request.params.n and (len(choices) == 1 or not _num_tokens(choices))


def _num_tokens(choices: Iterable[_Choice]) -> int:
    return sum(choice.request.num_output_tokens for choice in choices)


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
