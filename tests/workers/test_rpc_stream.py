"""Small calls over one stream, by real gRPC: each ends as a call of its own would."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from workers.errors import (
    DeadlineError,
    FrameError,
    InvalidRequestError,
    KVFerryError,
    OverloadedError,
    UnavailableError,
)
from workers.rpc import GrpcNetwork
from workers.rpc_stream import StreamedCalls, add_streamed_calls

TIMEOUT_S = 10.0
SERVICE, METHOD = "kvferry.test", "Do"


class Desk:
    """What the calls reach."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.gate = asyncio.Event()

    async def handle(self, data: bytes) -> None:
        self.log.append(data.decode())
        match data:
            case b"refuse":
                raise InvalidRequestError("no such row", param="row", code="gone")
            case b"full":
                raise OverloadedError("no room", retry_after_s=7.5)
            case b"damaged":
                raise FrameError("spoilt")
            case b"broken":
                raise ZeroDivisionError("a bug")
            case b"wait":
                try:
                    await self.gate.wait()
                except asyncio.CancelledError:
                    self.log.append("given up")
                    raise
        self.log.append(f"{data.decode()} done")

    async def until(self, entry: str) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while entry not in self.log:  # noqa: ASYNC110  Another side's doing.
                await asyncio.sleep(0.005)


@asynccontextmanager
async def serving(desk: Desk, port: int = 0):
    network = GrpcNetwork()
    server = network.server()
    network.answer_bytes(server, SERVICE, METHOD, desk.handle)
    address = await network.listen(server, "127.0.0.1", port)
    try:
        yield address, server
    finally:
        await server.stop(None)


def on_stage(script: Callable[[StreamedCalls, Desk], Awaitable[None]]) -> None:
    async def main() -> None:
        desk = Desk()
        async with serving(desk) as (address, _):
            channel = GrpcNetwork().connect(address)
            try:
                await script(StreamedCalls(channel, SERVICE, METHOD), desk)
            finally:
                await channel.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("data", "cls", "message"),
    [
        (b"refuse", InvalidRequestError, "no such row"),
        (b"full", OverloadedError, "no room"),
        (b"damaged", FrameError, "spoilt"),
        (b"broken", KVFerryError, "a bug"),
    ],
)
def test_errors_keep_their_type_and_the_stream_goes_on(data, cls, message):
    async def script(calls: StreamedCalls, desk: Desk) -> None:
        with pytest.raises(cls, match=message) as failed:
            await calls(data, TIMEOUT_S)
        assert type(failed.value) is cls
        if cls is InvalidRequestError:
            assert (failed.value.param, failed.value.code) == ("row", "gone")
        if isinstance(failed.value, OverloadedError):
            assert failed.value.retry_after_s == 7.5
        await calls(b"fine", TIMEOUT_S)
        assert "fine done" in desk.log

    on_stage(script)


def test_calls_run_side_by_side_and_each_gets_its_own_answer():
    async def script(calls: StreamedCalls, desk: Desk) -> None:
        waiting = asyncio.create_task(calls(b"wait", TIMEOUT_S))
        await desk.until("wait")
        answers = await asyncio.gather(
            *(calls(data, TIMEOUT_S) for data in (b"one", b"damaged", b"two")), return_exceptions=True
        )
        assert [type(answer) for answer in answers] == [type(None), FrameError, type(None)]
        assert not waiting.done()
        desk.gate.set()
        await waiting

    on_stage(script)


def test_what_is_given_up_is_cancelled_there_and_costs_the_others_nothing():
    async def script(calls: StreamedCalls, desk: Desk) -> None:
        with pytest.raises(DeadlineError, match=r"no answer within 0.05 s"):
            await calls(b"wait", 0.05)
        await desk.until("given up")
        desk.log.clear()
        cancelled = asyncio.create_task(calls(b"wait", TIMEOUT_S))
        await desk.until("wait")
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        await desk.until("given up")
        await calls(b"fine", TIMEOUT_S)

    on_stage(script)


def test_a_server_that_goes_fails_what_waits_and_its_successor_is_found():
    async def main() -> None:
        desk = Desk()
        async with serving(desk) as (address, server):
            channel = GrpcNetwork().connect(address)
            calls = StreamedCalls(channel, SERVICE, METHOD)
            waiting = [asyncio.create_task(calls(b"wait", TIMEOUT_S)) for _ in range(2)]
            await desk.until("wait")
            await server.stop(None)
            ended = await asyncio.gather(*waiting, return_exceptions=True)
            assert [type(error) for error in ended] == [UnavailableError] * 2
        async with serving(desk, int(address.rsplit(":", 1)[1])), asyncio.timeout(TIMEOUT_S):
            while True:
                try:
                    await calls(b"fine", TIMEOUT_S)
                    break
                except UnavailableError:  # The channel has not noticed yet.
                    await asyncio.sleep(0.02)
        await channel.close()

    asyncio.run(main())


def test_a_channel_that_is_closed_fails_what_waits_and_begins_nothing():
    async def main() -> None:
        desk = Desk()
        async with serving(desk) as (address, _):
            channel = GrpcNetwork().connect(address)
            calls = StreamedCalls(channel, SERVICE, METHOD)
            waiting = asyncio.create_task(calls(b"wait", TIMEOUT_S))
            await desk.until("wait")
            await channel.close()
            with pytest.raises(UnavailableError):
                await waiting
            await desk.until("given up")
            with pytest.raises(grpc.aio.UsageError):
                await calls(b"fine", TIMEOUT_S)

    asyncio.run(main())


class Registry:
    """A server as far as add_streamed_calls needs one."""

    def add_generic_rpc_handlers(self, handlers: tuple[grpc.GenericRpcHandler]) -> None:
        (self.handlers,) = handlers


class SlowContext:
    """One whose write takes a while: gRPC goes on with what was cut off, and refuses the next."""

    def __init__(self) -> None:
        self.began, self.ended = asyncio.Event(), asyncio.Event()

    async def write(self, message: bytes) -> None:
        self.began.set()
        await asyncio.sleep(0.05)
        self.ended.set()


def test_giving_up_while_the_answer_is_on_its_way_costs_the_others_nothing():
    async def main() -> None:
        registry: Any = Registry()
        context: Any = SlowContext()
        add_streamed_calls(registry, SERVICE, METHOD, Desk().handle)
        details: Any = SimpleNamespace(method=f"/{SERVICE}/{METHOD}", invocation_metadata=())

        async def messages() -> AsyncIterator[bytes]:
            yield bytes(8) + b"fine"
            await context.began.wait()
            yield bytes(8)

        await registry.handlers.service(details).stream_stream(messages(), context)
        assert context.ended.is_set()

    asyncio.run(main())
