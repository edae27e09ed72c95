"""The queue of requests without a worker: bounded, by priority, and fair between tenants.

Lower priorities go first. Within a priority the tenant goes next that got the fewest tokens (virtual token counters:
Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024), and within a tenant who came first.

Who has a turn asks workers for room. While all find it, more and more may ask at once, since an answer takes its time.
From the moment when one finds none, one at a time has the turn, so that nobody goes past the first, and loses it to
a more urgent one.

Prompts of jobs stand in that order too, behind requests of their priority. No load keeps them waiting for ever: of so
many that leave the queue one is a job's, if one waits. And what is forbidden to them alone keeps nobody else waiting: a
job that is held back lets all requests pass. How many jobs wait is bounded by jobs.max_in_flight, not here.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Container, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from workers.errors import OverloadedError
from workers.request import Request

# That may ask for room at once.
_MAX_TURNS = 32
# Of those that leave the queue while jobs wait, one of so many is a job's.
_JOBS_SHARE = 32


@dataclass(slots=True, eq=False)
class Waiter:
    tenant: str
    priority: int
    num_tokens: int
    job: bool = False
    # Set while it waits for its turn, or has it.
    turn: asyncio.Future[None] | None = None


class _Level:
    """All that wait with one priority."""

    def __init__(self) -> None:
        # In order of arrival.
        self.waiters: dict[str, list[Waiter]] = {}
        # Tokens that each tenant got since somebody waits here; of those who wait, at least.
        self._served: dict[str, int] = {}
        # Those of its waiters that have a turn.
        self._asked: dict[str, int] = {}

    def add(self, waiter: Waiter) -> None:
        self._served[waiter.tenant] = self._start(waiter.tenant)
        self.waiters.setdefault(waiter.tenant, []).append(waiter)

    def remove(self, waiter: Waiter) -> None:
        waiters = self.waiters[waiter.tenant]
        waiters.remove(waiter)
        if not waiters:
            del self.waiters[waiter.tenant]

    def serve(self, waiter: Waiter) -> None:
        self._served[waiter.tenant] += waiter.num_tokens

    def ask(self, waiter: Waiter) -> None:
        self._asked[waiter.tenant] = self._asked.get(waiter.tenant, 0) + waiter.num_tokens

    def asked(self, waiter: Waiter) -> None:
        """It asks no more."""
        self._asked[waiter.tenant] -= waiter.num_tokens

    def first(self, but: Container[Waiter]) -> Waiter | None:
        firsts = {tenant: next((w for w in waiters if w not in but), None) for tenant, waiters in self.waiters.items()}
        free = [tenant for tenant, first in firsts.items() if first is not None]
        # Of equals, the tenant that waits longer.
        return firsts[min(free, key=self._claim)] if free else None

    def num_tokens_before(self, tenant: str, num_tokens: int) -> int:
        """Of the other tenants: no more than the tenant itself has got with its last token."""
        own = sum(waiter.num_tokens for waiter in self.waiters.get(tenant, ()))
        start = self._start(tenant)
        before = own
        for other in self.waiters.keys() - {tenant}:
            waiting = sum(waiter.num_tokens for waiter in self.waiters[other])
            before += min(waiting, max(0, start + own + num_tokens - self._served[other]))
        return before

    def _claim(self, tenant: str) -> int:
        return self._served[tenant] + self._asked.get(tenant, 0)

    def _start(self, tenant: str) -> int:
        """What it has got, as far as that counts: who comes back has no claim to what it did not ask for meanwhile."""
        if tenant in self.waiters:
            return self._served[tenant]
        return max(self._served.get(tenant, 0), min((self._served[other] for other in self.waiters), default=0))


class RequestQueue:
    def __init__(self, max_num_queued_reqs: int, changed: asyncio.Event) -> None:
        """`changed` is set when whoever has a turn should look whether it still has."""
        self._max_num_queued_reqs = max_num_queued_reqs
        self._changed = changed
        # By priority, and whether they are jobs.
        self._levels: dict[tuple[int, bool], _Level] = {}
        # Who has a turn; how many may; who found no room when it last had one. Dicts for sets: in order.
        self._asking: dict[Waiter, None] = {}
        self._num_turns = 1
        self._refused: dict[Waiter, None] = {}
        # By whether they are jobs.
        self._num_waiting = Counter[bool]()
        # Requests that got what they waited for since a job did, or since one waits.
        self._num_since_job = 0
        # Until one of the requests gets what it waits for.
        self._jobs_are_held_back = False

    def __len__(self) -> int:
        return self._num_waiting.total()

    def num_tokens_before(self, request: Request) -> int:
        """Of those that wait, the tokens that go before the request, should it come now; nobody comes after it."""
        own = (request.priority, request.job)
        more_urgent = [level for key, level in self._levels.items() if key < own]
        waiting = sum(w.num_tokens for level in more_urgent for ws in level.waiters.values() for w in ws)
        level = self._levels.get(own)
        return waiting + (level.num_tokens_before(request.tenant, request.num_tokens) if level else 0)

    @contextmanager
    def joined(self, request: Request) -> Iterator[Waiter]:
        """A place in the queue until the end of the block. OverloadedError when it is full of no less urgent ones."""
        waiter = Waiter(request.tenant, request.priority, request.num_tokens, request.job)
        if not waiter.job and self._num_waiting[False] >= self._max_num_queued_reqs:
            self._displace_for(waiter)
        self._add(waiter)
        if self._asking and self._first(but=()) is waiter:
            self._changed.set()
        try:
            yield waiter
        finally:
            self._remove(waiter)

    @asynccontextmanager
    async def turn(self, waiter: Waiter) -> AsyncIterator[None]:
        """Wait until it is first of those that have none and may have one, and have it until the end of the block.

        Raises OverloadedError when another has taken its place in the queue.
        """
        waiter.turn = turn = asyncio.get_running_loop().create_future()
        self._pass_on()
        try:
            await turn
            yield
        finally:
            waiter.turn = None
            if turn.done() and not turn.cancelled():
                turn.exception()  # It counts as seen, should both it and a cancellation have come.
            if waiter in self._asking:
                del self._asking[waiter]
                self._levels[waiter.priority, waiter.job].asked(waiter)
            self._pass_on()

    def served(self, waiter: Waiter) -> None:
        """It has got what it waited for, which counts for its tenant."""
        self._levels[waiter.priority, waiter.job].serve(waiter)
        self._refused.pop(waiter, None)
        self._num_turns = min(2 * self._num_turns, _MAX_TURNS)
        self._num_since_job = 0 if waiter.job else self._num_since_job + 1
        self._jobs_are_held_back = False

    def refused(self, waiter: Waiter) -> None:
        """There is no room for it now: until it is served nobody asks that goes behind it."""
        self._refused[waiter] = None
        self._num_turns = 1
        if waiter.job:
            # It was its turn among many; the next look is after one more of them.
            self._num_since_job = min(self._num_since_job, _JOBS_SHARE - 2)

    def hold_back_jobs(self) -> bool:
        """The job that has a turn may not have what it waits for: it looks again when a request has got its own, or
        none waits. Whether one does."""
        self._jobs_are_held_back = True
        return self._num_waiting[False] > 0

    def _first(self, but: Container[Waiter]) -> Waiter | None:
        request = self._most_urgent(but, job=False)
        if self._jobs_are_held_back and self._num_waiting[False]:
            return request
        job = self._most_urgent(but, job=True)
        if request is None or job is None:
            return request or job
        # Those that ask are about to leave, too.
        is_due = self._num_since_job + len(self._asking) >= _JOBS_SHARE - 1 and not any(w.job for w in self._asking)
        return job if job.priority < request.priority or is_due else request

    def _most_urgent(self, but: Container[Waiter], job: bool) -> Waiter | None:
        firsts = (self._levels[key].first(but) for key in sorted(self._levels) if key[1] == job)
        return next((first for first in firsts if first is not None), None)

    def _pass_on(self) -> None:
        while len(self._asking) < self._num_turns:
            first = self._first(but=self._asking.keys() - self._refused.keys())
            # Nobody goes past who has found no room and waits.
            if first is None or first in self._asking or first.turn is None or first.turn.done():
                return
            self._asking[first] = None
            self._levels[first.priority, first.job].ask(first)
            first.turn.set_result(None)

    def _add(self, waiter: Waiter) -> None:
        self._levels.setdefault((waiter.priority, waiter.job), _Level()).add(waiter)
        self._num_waiting[waiter.job] += 1
        if waiter.job and self._num_waiting[True] == 1:
            self._num_since_job = 0

    def _remove(self, waiter: Waiter) -> None:
        self._refused.pop(waiter, None)
        key = waiter.priority, waiter.job
        self._levels[key].remove(waiter)
        if not self._levels[key].waiters:
            # Nobody is left to be fair to.
            del self._levels[key]
        self._num_waiting[waiter.job] -= 1
        self._pass_on()

    def _displace_for(self, new: Waiter) -> None:
        """Refuse the latest of the least urgent, of the tenant that has most of them; or `new`, if it is no better."""
        level = self._levels[max(key for key in self._levels if not key[1])]
        tenant = max(level.waiters, key=lambda tenant: len(level.waiters[tenant]))
        victim = next((w for w in reversed(level.waiters[tenant]) if w.turn is not None and not w.turn.done()), None)
        fairer = len(level.waiters.get(new.tenant, ())) + 1 < len(level.waiters[tenant])
        if victim is None or victim.priority < new.priority or (victim.priority == new.priority and not fairer):
            raise self._full()
        assert victim.turn is not None
        victim.turn.set_exception(self._full())

    def _full(self) -> OverloadedError:
        return OverloadedError(
            f"{self._num_waiting[False]} requests wait already (router.max_num_queued_reqs); retry later",
            code="queue_full",
        )
