"""What one call on a shared stream does to the others, and what numbers that nobody knows do: nothing."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.workers.test_rpc_stream import METHOD, SERVICE, TIMEOUT_S, Desk, Registry, on_stage, serving
from workers.errors import DeadlineError, UnavailableError
from workers.rpc import GrpcNetwork
from workers.rpc_stream import StreamedCalls, add_streamed_calls

UNKNOWN = b"\xff" * 8


def test_a_call_that_is_cancelled_costs_those_beside_it_nothing():
    async def script(calls: StreamedCalls, desk: Desk) -> None:
        beside = asyncio.create_task(calls(b"wait", TIMEOUT_S))
        await desk.until("wait")
        desk.log.clear()
        cancelled = asyncio.create_task(calls(b"wait", TIMEOUT_S))
        await desk.until("wait")
        cancelled.cancel()
        await desk.until("given up")
        assert desk.log.count("given up") == 1
        await calls(b"fine", TIMEOUT_S)
        assert not beside.done()
        desk.gate.set()
        await beside

    on_stage(script)


def test_a_call_that_is_late_fails_those_beside_it_at_once_so_that_they_are_sent_anew():
    """The connection may be dead: each would wait for its own deadline."""

    async def script(calls: StreamedCalls, desk: Desk) -> None:
        beside = [asyncio.create_task(calls(b"wait", TIMEOUT_S)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(DeadlineError):
            await calls(b"wait", 0.2)
        async with asyncio.timeout(1.0):
            ended = await asyncio.gather(*beside, return_exceptions=True)
        assert [type(error) for error in ended] == [UnavailableError] * 3
        desk.gate.set()
        await asyncio.gather(*(calls(b"wait", TIMEOUT_S) for _ in range(3)))

    on_stage(script)


def test_a_number_that_no_call_has_is_given_up_in_vain():
    async def main() -> None:
        registry: Any = Registry()
        desk, written = Desk(), list[bytes]()

        async def write(message: bytes) -> None:
            written.append(message)

        async def messages() -> AsyncIterator[bytes]:
            yield UNKNOWN
            yield b"cut"
            yield bytes(8) + b"fine"
            yield UNKNOWN

        add_streamed_calls(registry, SERVICE, METHOD, desk.handle)
        details: Any = SimpleNamespace(method=f"/{SERVICE}/{METHOD}", invocation_metadata=())
        await registry.handlers.service(details).stream_stream(messages(), SimpleNamespace(write=write))
        assert written == [bytes(8)]
        assert desk.log == ["fine", "fine done"]

    asyncio.run(main())


class Scrambler:
    """The far end of a stream: the first answer has a number of its own making, every other is true."""

    def __init__(self) -> None:
        self._answers: asyncio.Queue[bytes] = asyncio.Queue()
        self._num_answers = 0

    async def write(self, message: bytes) -> None:
        number = message[:8] if self._num_answers else UNKNOWN
        self._num_answers += 1
        await self._answers.put(number)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            yield await self._answers.get()

    def cancel(self) -> None:
        pass


def test_an_answer_with_a_number_that_nobody_waits_for_is_nobodys():
    async def main() -> None:
        channel: Any = SimpleNamespace(stream_stream=lambda method: Scrambler)
        calls = StreamedCalls(channel, SERVICE, METHOD)
        scrambled = asyncio.create_task(calls(b"one", 0.2))
        await asyncio.sleep(0)
        await calls(b"two", TIMEOUT_S)
        assert not scrambled.done()
        with pytest.raises(DeadlineError):
            await scrambled

    asyncio.run(main())


def num_connections(address: str) -> int:
    """That are established to the port of `address`, seen from the side that opened them."""
    port = int(address.rsplit(":", 1)[1])
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [row.split()[2:4] for table in tables for row in table]
    return sum(int(remote.rsplit(":", 1)[1], 16) == port and state == "01" for remote, state in rows)


def test_a_closed_channels_connection_ends_without_the_garbage_collectors_help():
    """A worker that stops says goodbye to those who are still connected."""

    async def main() -> None:
        desk = Desk()
        async with serving(desk) as (address, _):
            channel = GrpcNetwork().connect(address)
            calls = StreamedCalls(channel, SERVICE, METHOD)
            await calls(b"fine", TIMEOUT_S)
            assert num_connections(address) == 1
            await channel.close()
            del calls
            async with asyncio.timeout(TIMEOUT_S):
                while num_connections(address):  # noqa: ASYNC110  gRPC's threads' doing.
                    await asyncio.sleep(0.005)

    gc.collect()
    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()
