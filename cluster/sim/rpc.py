"""One call of the simulated network: the client's end and the server's."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import grpc.aio

if TYPE_CHECKING:
    from cluster.sim.network import SimChannel, SimServer

logger = logging.getLogger(__name__)

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Status:
    code: grpc.StatusCode = grpc.StatusCode.OK
    details: str = ""
    trailing_metadata: Metadata = ()

    def error(self) -> grpc.aio.AioRpcError:
        trailing = grpc.aio.Metadata(*self.trailing_metadata)
        return grpc.aio.AioRpcError(self.code, grpc.aio.Metadata(), trailing, self.details)


class Pipe:
    """One direction of one call: everything after its latency, nothing before what was sent earlier."""

    def __init__(self, channel: SimChannel, method: str, answers: bool) -> None:
        self._network = channel.host.network
        self._address = channel.address
        self._method = method
        self._answers = answers
        self._latest_s = 0.0
        self._under_way: deque[Callable[[], None]] = deque()

    def message(self, data: bytes, arrive: Callable[[bytes], None]) -> None:
        for late_s, copy in self._network.fate(self._method, self._address, self._answers, data):
            self._at(late_s, arrive, copy)

    def signal(self, arrive: Callable[..., None], *args: Any) -> None:
        """What is no message, and so no fault's business."""
        self._at(self._network.latency(), arrive, *args)

    def _at(self, late_s: float, arrive: Callable[..., None], *args: Any) -> None:
        loop = asyncio.get_running_loop()
        self._latest_s = max(self._latest_s, loop.time() + late_s)
        # Timers of one instant go off in any order: each delivers whatever is oldest.
        self._under_way.append(functools.partial(arrive, *args))
        loop.call_at(self._latest_s, lambda: self._under_way.popleft()(), context=self._network.context)


class ClientCall:
    """What a stub returns."""

    def __init__(self, channel: SimChannel, method: str, deserialise: Callable[[bytes], Any] | None) -> None:
        self.method = method
        self.to_server = Pipe(channel, method, answers=False)
        self.channel = channel
        self._deserialise = deserialise or (lambda data: data)
        self._served: list[ServerCall] = []
        self._messages: deque[bytes] = deque()
        self._status: Status | None = None
        self._cancelled = False
        self._began = asyncio.Event()
        self._news = asyncio.Event()
        self._deadline: asyncio.TimerHandle | None = None

    def begin(self, data: bytes, timeout_s: float | None) -> None:
        host = self.channel.host
        if not host.alive:
            return self.end(Status(grpc.StatusCode.UNAVAILABLE, "this host is dead"))
        if timeout_s is not None:
            late = Status(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
            self._deadline = asyncio.get_running_loop().call_later(timeout_s, self.abandon, late)
        self.to_server.message(data, self._reach_server)
        return None

    def cancel(self) -> bool:
        if self.done():
            return False
        self._cancelled = True
        self.abandon(Status(grpc.StatusCode.CANCELLED, "Locally cancelled by application!"))
        return True

    def abandon(self, status: Status) -> None:
        """End it here; the server hears of it later."""
        if not self.done():
            self.end(status)
            self.to_server.signal(self._cancel_server)

    def done(self) -> bool:
        return self._status is not None

    def cancelled(self) -> bool:
        return self._cancelled

    async def initial_metadata(self) -> grpc.aio.Metadata:
        """As in grpc.aio empty, and no error, when the call has failed before."""
        await self._wait(self._began)
        return grpc.aio.Metadata()

    def begun(self) -> None:
        self._began.set()

    def arrive(self, data: bytes) -> None:
        if not self.done():
            self._messages.append(data)
            self.begun()
            self._news.set()

    def end(self, status: Status) -> None:
        if self.done():
            return
        self._status = status
        if self._deadline:
            self._deadline.cancel()
        self.channel.forget(self)
        self.begun()
        self._news.set()

    def _reach_server(self, data: bytes) -> None:
        if self.done() and not self._served:
            return
        network = self.channel.host.network
        server = network.listening.get(self.channel.address)
        if server is None:
            refused = Status(grpc.StatusCode.UNAVAILABLE, f"{self.channel.address}: connection refused")
            asyncio.get_running_loop().call_later(network.latency(), self.end, refused, context=network.context)
        else:
            self._served.append(ServerCall(server, self, data))

    def _cancel_server(self) -> None:
        for served in self._served:
            served.cancel()

    async def _wait(self, event: asyncio.Event) -> None:
        try:
            await event.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise

    async def _next(self) -> Any:
        """The next message. Raises the call's error once there is none, StopAsyncIteration when it ended well."""
        while not self._messages and not self.done():
            self._news.clear()
            await self._wait(self._news)
        if self._messages and not self._cancelled:
            return self._deserialise(self._messages.popleft())
        # As in grpc.aio the end is asked for, and takes a turn of the loop: others run in between.
        await asyncio.sleep(0)
        if self._cancelled:
            raise asyncio.CancelledError
        assert self._status is not None
        if self._status.code is not grpc.StatusCode.OK:
            raise self._status.error()
        raise StopAsyncIteration


class UnaryCall(ClientCall):
    def __await__(self) -> Generator[Any, None, Any]:
        return self._next().__await__()


class StreamCall(ClientCall):
    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        return await self._next()


class ServerCall:
    """A handler at work, and its context."""

    def __init__(self, server: SimServer, client: ClientCall, data: bytes) -> None:
        self._server = server
        self._client = client
        self._to_client = Pipe(client.channel, client.method, answers=True)
        self._aborted: Status | None = None
        server.calls[self] = None
        self.task = asyncio.get_running_loop().create_task(
            self._answer(data), name=f"serve {client.method}", context=server.host.context
        )
        self.task.add_done_callback(lambda _: server.calls.pop(self, None))

    def cancel(self) -> None:
        self.task.cancel()

    def break_off(self, status: Status) -> None:
        """The server is going: its handler is cancelled, and the client told why."""
        self._to_client.signal(self._client.end, status)
        self.task.cancel()

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> NoReturn:
        self._aborted = Status(code, details, trailing_metadata)
        raise grpc.aio.AbortError("Locally aborted.")

    def invocation_metadata(self) -> Metadata:
        """Callers' metadata are not carried here."""
        return ()

    async def send_initial_metadata(self, metadata: Metadata) -> None:
        self._to_client.signal(self._client.begun)

    async def write(self, message: Any) -> None:
        self._to_client.message(self._serialise(message), self._client.arrive)

    async def _answer(self, data: bytes) -> None:
        try:
            await self._handle(data)
        except grpc.aio.AbortError:
            assert self._aborted is not None
            self._end(self._aborted)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # As grpc.aio does: whatever a handler raises is the caller's to see.
            logger.exception("%s failed", self._client.method)
            self._end(Status(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}"))

    async def _handle(self, data: bytes) -> None:
        handler = self._server.handler(self._client.method)
        if handler is None:
            return self._end(Status(grpc.StatusCode.UNIMPLEMENTED, "Method not found!"))
        self._serialise: Callable[[Any], bytes] = handler.response_serializer or (lambda message: message)
        request = handler.request_deserializer(data) if handler.request_deserializer else data
        if handler.unary_unary is not None:
            answer: Any = handler.unary_unary(request, self)  # type: ignore[arg-type]
            return self._end_with(self._serialise(await answer))
        assert handler.unary_stream is not None, "only unary requests are simulated"
        await self._stream(handler.unary_stream(request, self))  # type: ignore[arg-type]
        return self._end(Status())

    async def _stream(self, answers: Any) -> None:
        """Of a generator that yields its answers, or a coroutine that writes them."""
        if inspect.isawaitable(answers):
            await answers
            return
        async for message in answers:
            await self.write(message)

    def _end(self, status: Status) -> None:
        self._to_client.signal(self._client.end, status)

    def _end_with(self, data: bytes) -> None:
        """A unary answer and its status are one message: they get lost together."""
        self._to_client.message(data, self._arrive_and_end)

    def _arrive_and_end(self, data: bytes) -> None:
        self._client.arrive(data)
        self._client.end(Status())
