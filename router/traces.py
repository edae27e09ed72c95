"""What became of the latest requests: every try at them, on whom, and where the time went."""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

from protos import router_pb2
from workers.errors import NotFoundError
from workers.request import TokenOutput
from workers.timeline import Timeline
from workers.wire import timeline_to_pb

RUNNING = "running"
# The W3C `traceparent` that the running task's request came with; empty: none.
TRACEPARENT: ContextVar[str] = ContextVar("TRACEPARENT", default="")
# Streams may outlive any number of workers; so many of the latest tries are told of.
_MAX_TRIES = 32
# What is put behind a request's id: the place of a prompt, and what tells several of one id at once apart.
_SUFFIX = re.compile(r"(-[0-9]{1,6})?(\.[0-9a-f]{1,8})*")


@dataclass(slots=True, eq=False)
class Try:
    """One try at a request, or at one of its choices, on one pair of workers. Times are of the event loop's clock."""

    began_s: float
    choices: tuple[int, ...]
    prefill: str = ""
    decode: str = ""
    num_tokens: int = 0
    error: str = ""
    ended_s: float | None = None
    # Some answer came to its end.
    finished: bool = False
    # By choice, what is known of its time in this try.
    told: dict[int, Timeline] = field(default_factory=dict)
    heard: set[int] = field(default_factory=set)

    def placed(self, prefill: str, decode: str, now_s: float) -> None:
        self.prefill, self.decode = prefill, decode
        self.told = dict.fromkeys(self.choices, Timeline(queued_s=now_s - self.began_s))

    def hear(self, output: TokenOutput) -> Timeline | None:
        """What is known now, if the output tells something of it."""
        self.num_tokens += len(output.token_ids)
        self.finished |= output.finish_reason is not None
        if output.timeline is None:
            return None
        self.heard.add(output.choice)
        told = self.told[output.choice] = self.told[output.choice] | output.timeline
        return told

    def fail(self, error: str, now_s: float) -> None:
        """What its workers had not told counts as the phase in which it was: decode once there was a token."""
        self.error, self.ended_s = error, now_s
        for choice in self.choices:
            told = self.told.get(choice, Timeline())
            rest_s = max(0.0, now_s - self.began_s - told.total_s)
            if not self.prefill:
                lost = Timeline(queued_s=rest_s)
            elif choice in self.heard:
                lost = Timeline(decode_s=rest_s)
            else:
                lost = Timeline(prefill_s=rest_s)
            self.told[choice] = told + lost

    def to_proto(self, trace_began_s: float, now_s: float) -> router_pb2.Try:
        longest = max(self.told.values(), key=lambda timeline: timeline.total_s, default=Timeline())
        return router_pb2.Try(
            began_s=self.began_s - trace_began_s,
            elapsed_s=(now_s if self.ended_s is None else self.ended_s) - self.began_s,
            choices=self.choices,
            prefill=self.prefill,
            decode=self.decode,
            num_tokens=self.num_tokens,
            error=self.error,
            timeline=timeline_to_pb(longest),
            running=self.ended_s is None,
        )


@dataclass(slots=True, eq=False)
class Trace:
    request_id: str
    num_prompt_tokens: int
    began_s: float
    # Who may see it.
    tenant: str = ""
    # Of whoever sent it.
    traceparent: str = field(default_factory=TRACEPARENT.get)
    arrived_unix_s: float = field(default_factory=time.time)
    tries: deque[Try] = field(default_factory=lambda: deque(maxlen=_MAX_TRIES))
    num_tries: int = 0
    outcome: str = RUNNING
    # Its outcome is an error.
    failed: bool = False
    # When the first of its tokens came here, and when it ended.
    token_1_s: float | None = None
    ended_s: float | None = None

    def begin(self, choices: Iterable[int], now_s: float) -> Try:
        self.num_tries += 1
        self.tries.append(one := Try(now_s, tuple(choices)))
        return one

    @property
    def ttft_s(self) -> float | None:
        return None if self.token_1_s is None else self.token_1_s - self.began_s

    @property
    def num_tokens(self) -> int:
        return sum(one.num_tokens for one in self.tries)

    @property
    def tpot_s(self) -> float | None:
        """(E2E - TTFT) / (N - 1), N of one choice; None while it runs, or with too few tokens."""
        num_choices = len({choice for one in self.tries for choice in one.choices})
        num_more = self.num_tokens / max(num_choices, 1) - 1
        if self.ended_s is None or self.token_1_s is None or num_more <= 0:
            return None
        return (self.ended_s - self.token_1_s) / num_more

    def to_proto(self, now_s: float, max_tries: int = _MAX_TRIES) -> router_pb2.Trace:
        return router_pb2.Trace(
            request_id=self.request_id,
            num_prompt_tokens=self.num_prompt_tokens,
            arrived_unix_s=self.arrived_unix_s,
            elapsed_s=(now_s if self.ended_s is None else self.ended_s) - self.began_s,
            outcome=self.outcome,
            num_tries=self.num_tries,
            tries=[one.to_proto(self.began_s, now_s) for one in list(self.tries)[-max_tries:]],
            num_tokens=self.num_tokens,
            ttft_s=self.ttft_s,
            tpot_s=self.tpot_s,
            tenant=self.tenant,
        )


class Traces:
    """Of all requests that run, and of the latest `max_ended` that have ended."""

    def __init__(self, max_ended: int) -> None:
        self._max_ended = max_ended
        # Told of every trace that has ended, soon after.
        self.on_end: Callable[[Trace], None] | None = None
        self._running: dict[str, Trace] = {}
        # Ids are their tenants' own.
        self._ended: OrderedDict[tuple[str, str], Trace] = OrderedDict()

    def begin(self, request_id: str, num_prompt_tokens: int, now_s: float, tenant: str = "") -> Trace:
        trace = self._running[request_id] = Trace(request_id, num_prompt_tokens, now_s, tenant)
        return trace

    def end(self, trace: Trace, outcome: str, now_s: float) -> None:
        trace.outcome, trace.ended_s = outcome, now_s
        for one in trace.tries:
            if one.ended_s is None:
                one.ended_s = now_s
        if self._running.get(trace.request_id) is trace:
            del self._running[trace.request_id]
        if self.on_end:
            # The last output is still to go out.
            asyncio.get_running_loop().call_soon(self.on_end, trace)
        key = trace.tenant, trace.request_id
        self._ended[key] = trace
        self._ended.move_to_end(key)
        while len(self._ended) > self._max_ended:
            self._ended.popitem(last=False)

    def running(self) -> Iterator[Trace]:
        """The latest to arrive first."""
        return reversed(self._running.values())

    def ended(self) -> Iterator[Trace]:
        """The latest to end first."""
        return reversed(self._ended.values())

    def tell(self, request_id: str, tenant: str = "") -> list[router_pb2.Trace]:
        """Of this id of the tenant's; of a request with several prompts, and of an id used by several at once, those of
        each. Raises NotFoundError.
        """
        known = self._ended | {(trace.tenant, name): trace for name, trace in self._running.items()}
        found = [trace for (owner, name), trace in known.items() if owner == tenant and _is_of(name, request_id)]
        if not found:
            raise NotFoundError(
                f"no request {request_id[:128]!r} is known here; a router knows those that run and the latest "
                f"{self._max_ended} (router.max_traces)",
                param="request_id",
            )
        now_s = asyncio.get_running_loop().time()
        return [trace.to_proto(now_s) for trace in found]


def _is_of(name: str, request_id: str) -> bool:
    return bool(request_id) and name.startswith(request_id) and bool(_SUFFIX.fullmatch(name, len(request_id)))
