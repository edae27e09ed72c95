"""New tokens on their way to the routers: one message per engine step and router."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable

from workers.request import TokenOutput

# A router that is this many steps behind is treated as lost.
_MAX_BACKLOG = 10_000


class OutputStreams:
    """A router without an open stream keeps its outputs for one lease; then `on_lost(router_id)` is called."""

    def __init__(self, lease_s: float, on_lost: Callable[[str], None]) -> None:
        self._lease_s = lease_s
        self._on_lost = on_lost
        self._backlog: dict[str, list[list[TokenOutput]]] = defaultdict(list)
        self._news: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        # Routers with an open stream, and the stream that is theirs now.
        self._open: dict[str, object] = {}
        self._leases: dict[str, asyncio.TimerHandle] = {}

    def expect(self, router_id: str) -> None:
        """This router has a request here: from now on it must have a stream open, but for gaps of one lease."""
        if router_id not in self._open and router_id not in self._leases:
            self._start_lease(router_id)

    def publish(self, outputs: Iterable[TokenOutput]) -> None:
        by_router: dict[str, list[TokenOutput]] = defaultdict(list)
        for output in outputs:
            by_router[output.router_id].append(output)
        for router_id, step in by_router.items():
            self.expect(router_id)
            self._backlog[router_id].append(step)
            self._news[router_id].set()
            if len(self._backlog[router_id]) > _MAX_BACKLOG:
                self._lose(router_id)

    async def stream(self, router_id: str) -> AsyncGenerator[list[TokenOutput], None]:
        """Steps as they come. A second stream of a router ends its first."""
        me = self._open[router_id] = object()
        if lease := self._leases.pop(router_id, None):
            lease.cancel()
        news = self._news[router_id]
        news.set()  # Wakes an older stream, which then sees that it is no longer the one.
        try:
            while self._open.get(router_id) is me:
                steps = self._backlog.pop(router_id, [])
                for step in steps:
                    yield step
                if not steps:
                    news.clear()
                    await news.wait()
        finally:
            if self._open.get(router_id) is me:
                del self._open[router_id]
                self._start_lease(router_id)

    def close(self) -> None:
        for lease in self._leases.values():
            lease.cancel()
        self._leases.clear()

    def _start_lease(self, router_id: str) -> None:
        loop = asyncio.get_running_loop()
        self._leases[router_id] = loop.call_later(self._lease_s, self._lose, router_id)

    def _lose(self, router_id: str) -> None:
        self._open.pop(router_id, None)
        if lease := self._leases.pop(router_id, None):
            lease.cancel()
        self._backlog.pop(router_id, None)
        if news := self._news.pop(router_id, None):
            news.set()
        self._on_lost(router_id)
