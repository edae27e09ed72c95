"""`kvferry top`: asks every router once an interval, and shows what they tell until it is interrupted."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc.aio
from rich.console import Console, ConsoleDimensions
from rich.live import Live

from cluster.connection import AsyncConnection
from cluster.rates import Rates
from cluster.render_top import frame
from protos import router_pb2 as pb
from workers.errors import DeadlineError, KVFerryError, UnavailableError

# A router that is there answers in a few milliseconds.
_TIMEOUT_S = 2.0
# What is printed where nobody says how large it may be.
_PIPE_SIZE = ConsoleDimensions(120, 48)


@dataclass(slots=True)
class Looked:
    """What one router told last, and since when it tells nothing."""

    address: str
    status: pb.GetStatusResponse | None = None
    activity: pb.GetActivityResponse = field(default_factory=pb.GetActivityResponse)
    heard_s: float = 0.0
    error: str = ""


class Watch:
    """The routers of a cluster, seen again and again."""

    def __init__(self, target: str) -> None:
        self._connections = [AsyncConnection(address) for address in _addresses(target)]
        self.routers = [Looked(address) for address in _addresses(target)]
        self.rates = Rates()

    async def look(self) -> None:
        """Raises what no later look would mend: a wrong key, an unknown call."""
        await asyncio.gather(*map(self._look, self._connections, self.routers))
        now_s = time.monotonic()
        if one := next((one for one in self.routers if not one.error), None):
            assert one.status is not None
            self.rates.see([worker.stats for worker in one.status.workers], now_s)

    async def close(self) -> None:
        await asyncio.gather(*(connection.close() for connection in self._connections))

    async def _look(self, connection: AsyncConnection, one: Looked) -> None:
        router, metadata = connection.stubs[0].router, connection.metadata
        try:
            status, activity = await asyncio.gather(
                router.GetStatus(pb.GetStatusRequest(), timeout=_TIMEOUT_S, metadata=metadata),
                router.GetActivity(pb.GetActivityRequest(), timeout=_TIMEOUT_S, metadata=metadata),
            )
        except grpc.aio.AioRpcError as exc:
            one.error = _lasting(connection.routers.error(exc, 0)).message
            return
        one.status, one.activity, one.heard_s, one.error = status, activity, time.monotonic(), ""


def watch(target: str, interval_s: float, once: bool) -> None:
    """On a terminal until Ctrl-C; else, and with `once`, one frame. Raises KVFerryError."""
    console = Console() if sys.stdout.isatty() else Console(width=_PIPE_SIZE.width, height=_PIPE_SIZE.height)
    if once or not console.is_terminal:
        asyncio.run(_print(target, console, interval_s))
    else:
        asyncio.run(_live(target, console, interval_s))


async def _print(target: str, console: Console, interval_s: float) -> None:
    seen = Watch(target)
    try:
        await seen.look()
        _require_one(seen.routers)
        # Rates are told by two looks.
        await asyncio.sleep(interval_s)
        await seen.look()
        console.print(frame(seen.routers, seen.rates, console.size))
    finally:
        await seen.close()


async def _live(target: str, console: Console, interval_s: float) -> None:
    seen = Watch(target)
    loop = asyncio.get_running_loop()
    try:
        await seen.look()
        _require_one(seen.routers)
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                began_s = loop.time()
                live.update(frame(seen.routers, seen.rates, console.size), refresh=True)
                await asyncio.sleep(max(0.0, began_s + interval_s - loop.time()))
                await seen.look()
    finally:
        await seen.close()


def _addresses(target: str) -> list[str]:
    return [address.strip() for address in target.split(",") if address.strip()]


def _require_one(routers: Sequence[Looked]) -> None:
    """At first somebody has to be there; who goes later is waited for."""
    if all(one.error for one in routers):
        raise UnavailableError(routers[0].error)


def _lasting(error: KVFerryError) -> KVFerryError:
    if isinstance(error, UnavailableError | DeadlineError):
        return error
    raise error
