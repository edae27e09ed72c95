"""Router: token ids in, token outputs out, whatever happens to the workers in between.

A request is its tokens, so a retry is the same request with the tokens that are there already: a stream that breaks
goes on from its next index on other workers, and the client sees each token once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any

from protos import router_pb2
from router.admission import Admission, Placement
from router.call import Call, Choice, Failures, are_one, num_tokens_of
from router.config import RouterConfig
from router.merge import merge
from router.outputs import Outputs
from router.pool import WorkerPool
from router.traces import Traces, Try
from workers.backoff import pause_s
from workers.engine.choices import children_of
from workers.errors import (
    AbortedError,
    DeadlineError,
    FrameError,
    KVFerryError,
    LayoutMismatchError,
    StaleGrantError,
    UnavailableError,
)
from workers.request import NO_TERMS, Request, SamplingParams, Terms, TokenOutput

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
        self._calls: dict[str, Call] = {}
        self.traces = Traces(config.max_traces)
        # Tries that failed and were followed by another, by the class of the error.
        self.num_retries: Counter[str] = Counter()

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
        """Outputs of all choices: of each with ascending index, the last with finish_reason and its whole timeline,
        some others with the timeline so far.

        `so_far`: by choice, the tokens that are there already, and no choices but these. Closing it aborts all. The
        caller has validated params against the model, and gives no two requests at once the same id. Raises
        KVFerryError.
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
            job=terms.job,
        )
        choices = [Choice(one) for one in (children_of(request) if params.n > 1 else [request])]
        if so_far is not None:
            choices = [choice for choice in choices if choice.request.choice in so_far]
            for choice in choices:
                choice.request.output_token_ids.extend(so_far[choice.request.choice])
        return self._traced(request, choices)

    def end(self, request_id: str, error: KVFerryError) -> None:
        """Let the outputs of this request end with `error` now, whatever it waits for, and abort it on its workers."""
        if call := self._calls.get(request_id):
            call.end(error)

    async def _traced(self, request: Request, choices: Sequence[Choice]) -> AsyncGenerator[TokenOutput, None]:
        trace = self.traces.begin(request.request_id, request.num_prompt_tokens, _now(), request.tenant)
        call = self._calls[request.request_id] = Call(trace)
        outcome = "closed by its reader: a stop string was found, or the client is gone"
        try:
            async with aclosing(self._answer(call, request, choices, Failures(_now()))) as outputs:
                async for output in outputs:
                    if trace.token_1_s is None:
                        trace.token_1_s = _now()
                    yield output
                    outcome = output.finish_reason or outcome
        except KVFerryError as error:
            outcome, trace.failed = f"{type(error).__name__}: {error.message}", True
            raise
        finally:
            del self._calls[request.request_id]
            self.traces.end(trace, outcome, _now())

    async def _answer(
        self, call: Call, request: Request, choices: Sequence[Choice], failures: Failures
    ) -> AsyncGenerator[TokenOutput, None]:
        """All that is still to come of `choices`, of those that `request` asks for."""
        by_index = {choice.request.choice: choice for choice in choices}
        while are_one(request, choices):
            num_tokens = num_tokens_of(choices)
            numbered = self._numbered(request)
            one_try = call.trace.begin(request.choices, failures.since_s)
            try:
                async with aclosing(self._attempt(call, numbered, failures.tried, one_try)) as outputs:
                    async for output in outputs:
                        new = by_index[output.choice].take(output, one_try)
                        # Where roles have other weights each, prefill samples token 1 again.
                        if new.token_ids or new.finish_reason is not None:
                            yield new
                return
            except KVFerryError as error:
                failures.since_s = _now()
                one_try.fail(error.message, failures.since_s)
                # With its workers known: of two that are never chosen again, which is no fault of the request's.
                was_unfit = isinstance(error, LayoutMismatchError) and bool(one_try.prefill)
                if not isinstance(error, _RETRYABLE) and not was_unfit:
                    raise
                for choice in choices:
                    choice.spent += one_try.told[choice.request.choice]
                if was_unfit:
                    continue
                # Whoever gets on is not counted out: streams may outlive any number of workers. Prefill's token is no
                # getting on: a request that kills whoever decodes it has it, too.
                got_on = num_tokens_of(choices) > num_tokens + len(choices)
                failures.num_in_a_row = 1 if got_on else failures.num_in_a_row + 1
                logger.warning(
                    "%s: try %d ended after %d tokens: %s",
                    request.request_id, failures.num_in_a_row, num_tokens_of(choices), error.message,
                    extra={"request_id": request.request_id},
                )  # fmt: skip
                if got_on:
                    for choice in choices:
                        choice.request.replica_address = numbered.replica_address
                if failures.num_in_a_row >= self._config.max_attempts or self._pool.stopping:
                    raise
                self.num_retries[type(error).__name__] += 1
                key = f"{request.request_id} {request.choice}"
                async with call.wait():
                    await asyncio.sleep(pause_s(self._config.retry_s, failures.num_in_a_row, key))
        rest = [
            self._answer(call, one.request, [one], replace(failures, tried=set(failures.tried)))
            for one in choices
            if not one.finished
        ]
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
        await asyncio.gather(*self._background, self._admission.stop(), return_exceptions=True)

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
            job=request.job,
        )

    async def _attempt(
        self, call: Call, request: Request, tried: set[str], one_try: Try
    ) -> AsyncGenerator[TokenOutput, None]:
        """One try on one pair of workers, from the request's tokens so far; adds to `tried` who may be
        at fault if it fails."""
        async with call.wait():
            placement = await self._admission.place(request, tried)
        one_try.placed(placement.prefill.name, placement.decode.name, _now())
        tried |= {placement.prefill.address, placement.decode.address}
        request.replica_address = placement.replica_address
        running = set(request.choices)
        with self._under_way(call, request, placement, running) as outputs:
            for output in await self._token_1(request, placement, outputs):
                if output.finish_reason is not None:
                    running.remove(output.choice)
                yield output
            if placement.grant is not None:
                tried.discard(placement.prefill.address)  # It has done its part.
            if running:
                await self._first_of_decode(placement, outputs)
            while running:
                output = await outputs.next()
                if output.choice not in running:
                    continue
                if output.finish_reason is not None:
                    running.remove(output.choice)
                yield output

    @contextmanager
    def _under_way(self, call: Call, request: Request, placement: Placement, running: set[int]) -> Iterator[Outputs]:
        """What the attempt gets from its decode worker. Choices that run at the end of the block are aborted."""
        attempt_id = request.request_id
        self._attempts[attempt_id] = placement
        call.attempts[attempt_id] = placement.decode
        try:
            yield placement.decode.expect(attempt_id, request.params.n if request.job else 0)
        finally:
            self._admission.leave(placement)
            del self._attempts[attempt_id], call.attempts[attempt_id]
            placement.decode.forget(attempt_id)
            if running:
                self._abort(attempt_id, placement)

    async def _token_1(self, request: Request, placement: Placement, outputs: Outputs) -> Sequence[TokenOutput]:
        """Of every choice; none, where it is decode that computes it."""
        if placement.grant is None:
            await placement.decode.submit(request)
            return ()
        pairs, pair = self._pool.pairs, (placement.prefill, placement.decode)
        asked = pairs.key(*pair)
        try:
            first = await placement.prefill.prefill(request, placement.grant, outputs)
        except LayoutMismatchError as error:
            if pairs.key(*pair) == asked:  # Else another has come meanwhile.
                pairs.refuse(*pair, error)
            raise
        self._admission.token_1(placement)
        return first

    async def _first_of_decode(self, placement: Placement, outputs: Outputs) -> None:
        """Wait until it is there: before that, prefill may take the end of the hand-off with it when it dies."""
        placement.decode.limit_silence(outputs)
        if placement.grant is None:
            await outputs.arrival()
            self._admission.token_1(placement)
        else:
            with placement.prefill.ends(outputs):
                await outputs.arrival()

    def _abort(self, request_id: str, placement: Placement) -> None:
        self._in_background(placement.decode.abort(request_id))
        if placement.prefill is not placement.decode:
            self._in_background(placement.prefill.abort(request_id))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _now() -> float:
    return asyncio.get_running_loop().time()
