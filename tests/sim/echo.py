"""A server that does what it is told over either network, and calls to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from workers.rpc import Network

# On the real clock a script waits this long for what has been sent to arrive.
MOMENT_S = 0.15
SERVICE = "test.Echo"


class Echo:
    """Handlers that do what the request says, and note how they ended."""

    def __init__(self) -> None:
        self.log: list[str] = []

    async def unary(self, request: bytes, context: Any) -> bytes:
        try:
            await self._obey(request, context)
        except asyncio.CancelledError:
            self.log.append("unary cancelled")
            raise
        return b"re: " + request

    async def stream(self, request: bytes, context: Any) -> Any:
        try:
            await context.send_initial_metadata(())
            yield b"one"
            yield b"two"
            await self._obey(request, context)
        except asyncio.CancelledError:
            self.log.append("stream cancelled")
            raise

    async def written(self, request: bytes, context: Any) -> None:
        await context.write(b"one")
        await self._obey(request, context)

    async def _obey(self, request: bytes, context: Any) -> None:
        self.log.append(f"got {request.decode()}")
        if request == b"hang":
            await asyncio.sleep(30)
        if request == b"fail":
            raise ValueError("broken")
        if request == b"abort":
            await context.abort(grpc.StatusCode.DATA_LOSS, "spoilt", (("key", "value"),))

    def add_to(self, server: grpc.aio.Server) -> None:
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Unary": grpc.unary_unary_rpc_method_handler(self.unary),
            "Stream": grpc.unary_stream_rpc_method_handler(self.stream),
            "Written": grpc.unary_stream_rpc_method_handler(self.written),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


def ask(channel: grpc.aio.Channel, request: bytes, method: str = "Unary", timeout: float | None = None) -> Any:
    call: Any = channel.unary_unary(f"/{SERVICE}/{method}")
    return call(request, timeout=timeout)


def ask_stream(channel: grpc.aio.Channel, request: bytes, method: str = "Stream") -> Any:
    call: Any = channel.unary_stream(f"/{SERVICE}/{method}")
    return call(request)


def _ended(error: BaseException) -> list[object]:
    if isinstance(error, grpc.aio.AioRpcError):
        # What could not be reached is described in each network's own words.
        details = "" if error.code() is grpc.StatusCode.UNAVAILABLE else error.details()
        return [error.code(), details, *(error.trailing_metadata() or ())]
    return [type(error)]


async def observe(awaitable: Awaitable[Any]) -> list[object]:
    try:
        return [await awaitable]
    except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
        return _ended(error)


async def read_all(call: Any) -> list[object]:
    seen: list[object] = []
    try:
        seen.append(tuple(await call.initial_metadata()))
        seen.append(call.done())
        async for message in call:
            seen.append(message)  # noqa: PERF401  What came before an error counts.
    except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
        seen += _ended(error)
    # Whether a call that had answers was over already when it began is luck.
    return [item for item in seen if not (isinstance(item, bool) and any(isinstance(other, bytes) for other in seen))]


class Stage:
    def __init__(self, network: Network) -> None:
        self.network = network
        self.echo = Echo()

    async def open(self) -> None:
        self.server = self.network.server()
        self.echo.add_to(self.server)
        self.address = await self.network.listen(self.server, "127.0.0.1", 0)
        self.channel = self.network.connect(self.address)

    async def close(self) -> None:
        await self.channel.close()
        await self.server.stop(None)


Script = Callable[[Stage], Awaitable[Any]]


async def play(script: Script, network: Network) -> tuple[Any, list[str]]:
    stage = Stage(network)
    await stage.open()
    try:
        seen = await script(stage)
    finally:
        await stage.close()
    return seen, sorted(stage.echo.log)
