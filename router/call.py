"""One call of Router.generate: its choices as far as the client has them, what went wrong, and how it is ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from router.traces import Trace, Try
from router.worker_handle import WorkerHandle
from workers.errors import FrameError, KVFerryError
from workers.request import Request, TokenOutput
from workers.timeline import Timeline


@dataclass(slots=True, eq=False)
class Call:
    """One `generate`, and how it is ended from outside."""

    trace: Trace
    # Where its attempts wait for outputs, and what else it waits for. Dicts for sets: in order.
    attempts: dict[str, WorkerHandle] = field(default_factory=dict)
    waits: dict[asyncio.Timeout, None] = field(default_factory=dict)
    error: KVFerryError | None = None

    def end(self, error: KVFerryError) -> None:
        """Again is no error, and changes nothing."""
        if self.error is not None:
            return
        self.error = error
        for attempt_id, worker in self.attempts.items():
            worker.fail(attempt_id, error)
        for wait in self.waits:
            wait.reschedule(_now())

    @asynccontextmanager
    async def wait(self) -> AsyncIterator[None]:
        """Around a wait that `end` cuts short, like a cancellation."""
        if self.error is not None:
            raise self.error
        wait = asyncio.timeout(None)
        self.waits[wait] = None
        try:
            async with wait:
                yield
        except TimeoutError:
            if self.error is None:
                raise
            raise self.error from None
        finally:
            del self.waits[wait]


@dataclass(slots=True)
class Failures:
    """What went wrong so far."""

    # When the latest try ended; at first, when the request came. On the event loop's clock.
    since_s: float
    # Tries without progress.
    num_in_a_row: int = 0
    # Addresses of workers where it was placed.
    tried: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Choice:
    """One answer as far as the client has it."""

    request: Request
    # In tries that failed.
    spent: Timeline = field(default_factory=Timeline)
    finished: bool = False

    def take(self, output: TokenOutput, one_try: Try) -> TokenOutput:
        """What of it is new; where its time went, if that is told."""
        told = one_try.hear(output)
        output.timeline = None if told is None else self.spent + told
        _leave_unseen(output, self.request)
        self.request.output_token_ids.extend(output.token_ids)
        self.finished = output.finish_reason is not None
        return output


def are_one(request: Request, choices: Sequence[Choice]) -> bool:
    """Whether an attempt at `request` goes on with all of them. Once several have begun, each goes on alone."""
    return len(choices) == request.params.n and (len(choices) == 1 or not num_tokens_of(choices))


def num_tokens_of(choices: Iterable[Choice]) -> int:
    return sum(choice.request.num_output_tokens for choice in choices)


def _leave_unseen(output: TokenOutput, request: Request) -> None:
    """Take away tokens that are there already. FrameError when tokens are missing before it."""
    have = request.num_output_tokens
    if output.index > have:
        raise FrameError(f"{request.request_id}: token {have} is next, {output.index} came")
    seen = have - output.index
    if seen:
        output.token_ids, output.logprobs = output.token_ids[seen:], output.logprobs[seen:]
    output.request_id, output.index = request.request_id, have


def _now() -> float:
    return asyncio.get_running_loop().time()
