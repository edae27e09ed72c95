"""The queue of requests without a worker: bounded, by priority, and fair between tenants.

Lower priorities go first. Within a priority the tenant goes next that got the fewest tokens (virtual token counters:
Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024), and within a tenant who came first. One waiter at
a time has the turn, and loses it to a more urgent one when it finds no room.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from workers.errors import OverloadedError
from workers.request import Request


@dataclass(slots=True, eq=False)
class Waiter:
    tenant: str
    priority: int
    num_tokens: int
    # Set while it waits for its turn.
    turn: asyncio.Future[None] | None = None


class _Level:
    """All that wait with one priority."""

    def __init__(self) -> None:
        # In order of arrival.
        self.waiters: dict[str, list[Waiter]] = {}
        # Tokens that each tenant got since somebody waits here; of those who wait, at least.
        self._served: dict[str, int] = {}

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

    def first(self) -> Waiter:
        # Of equals, the tenant that waits longer.
        return self.waiters[min(self.waiters, key=lambda tenant: self._served[tenant])][0]

    def num_tokens_before(self, tenant: str, num_tokens: int) -> int:
        """Of the other tenants: no more than the tenant itself has got with its last token."""
        own = sum(waiter.num_tokens for waiter in self.waiters.get(tenant, ()))
        start = self._start(tenant)
        before = own
        for other in self.waiters.keys() - {tenant}:
            waiting = sum(waiter.num_tokens for waiter in self.waiters[other])
            before += min(waiting, max(0, start + own + num_tokens - self._served[other]))
        return before

    def _start(self, tenant: str) -> int:
        """What it has got, as far as that counts: who comes back has no claim to what it did not ask for meanwhile."""
        if tenant in self.waiters:
            return self._served[tenant]
        return max(self._served.get(tenant, 0), min((self._served[other] for other in self.waiters), default=0))


class RequestQueue:
    def __init__(self, max_num_queued_reqs: int, changed: asyncio.Event) -> None:
        """`changed` is set when whoever has the turn should look whether it still has."""
        self._max_num_queued_reqs = max_num_queued_reqs
        self._changed = changed
        self._levels: dict[int, _Level] = {}
        self._holder: Waiter | None = None
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def num_tokens_before(self, request: Request) -> int:
        """Of those that wait, the tokens that go before the request, should it come now; nobody comes after it."""
        more_urgent = [level for priority, level in self._levels.items() if priority < request.priority]
        waiting = sum(w.num_tokens for level in more_urgent for ws in level.waiters.values() for w in ws)
        level = self._levels.get(request.priority)
        return waiting + (level.num_tokens_before(request.tenant, request.num_tokens) if level else 0)

    @contextmanager
    def joined(self, request: Request) -> Iterator[Waiter]:
        """A place in the queue until the end of the block. OverloadedError when it is full of no less urgent ones."""
        waiter = Waiter(request.tenant, request.priority, request.num_tokens)
        if self._num_waiting >= self._max_num_queued_reqs:
            self._displace_for(waiter)
        self._levels.setdefault(waiter.priority, _Level()).add(waiter)
        self._num_waiting += 1
        if self._holder is not None and self._first() is waiter:
            self._changed.set()
        try:
            yield waiter
        finally:
            self._remove(waiter)

    @asynccontextmanager
    async def turn(self, waiter: Waiter) -> AsyncIterator[None]:
        """Wait until it is first and nobody else has the turn, and have it until the end of the block.

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
            if self._holder is waiter:
                self._holder = None
            self._pass_on()

    def served(self, waiter: Waiter) -> None:
        """It has got what it waited for, which counts for its tenant."""
        self._levels[waiter.priority].serve(waiter)

    def _first(self) -> Waiter | None:
        return self._levels[min(self._levels)].first() if self._levels else None

    def _pass_on(self) -> None:
        first = self._first()
        if self._holder is None and first is not None and first.turn is not None and not first.turn.done():
            self._holder = first
            first.turn.set_result(None)

    def _remove(self, waiter: Waiter) -> None:
        level = self._levels[waiter.priority]
        level.remove(waiter)
        if not level.waiters:
            # Nobody is left to be fair to.
            del self._levels[waiter.priority]
        self._num_waiting -= 1
        self._pass_on()

    def _displace_for(self, new: Waiter) -> None:
        """Refuse the latest of the least urgent, of the tenant that has most of them; or `new`, if it is no better."""
        level = self._levels[max(self._levels)]
        tenant = max(level.waiters, key=lambda tenant: len(level.waiters[tenant]))
        victim = next((w for w in reversed(level.waiters[tenant]) if w.turn is not None and not w.turn.done()), None)
        fairer = len(level.waiters.get(new.tenant, ())) + 1 < len(level.waiters[tenant])
        if victim is None or victim.priority < new.priority or (victim.priority == new.priority and not fairer):
            raise self._full()
        assert victim.turn is not None
        victim.turn.set_exception(self._full())

    def _full(self) -> OverloadedError:
        return OverloadedError(
            f"{self._num_waiting} requests wait already (router.max_num_queued_reqs); retry later", code="queue_full"
        )
