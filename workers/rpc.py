"""One way to call and to be called: channels, servers, deadlines, and errors that keep their type across the wire."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, NoReturn, Protocol, TypeVar, cast

import grpc
import grpc.aio

from protos.calls_pb2_grpc import add_MultiplexServiceServicer_to_server
from workers import errors
from workers.errors import KVFerryError
from workers.members import MembersOnly
from workers.rpc_multiplex import MultiplexedChannel, MultiplexService
from workers.rpc_stream import StreamedCalls, add_streamed_calls
from workers.tls import Membership
from workers.tls_channel import RotatingChannel

M = TypeVar("M")
S = TypeVar("S")

_ERROR_KEY, _PARAM_KEY, _CODE_KEY = "kvferry-error", "kvferry-param", "kvferry-code"
_RETRY_KEY = "kvferry-retry-after-s"
# What gRPC itself says of a message that its server does not read.
_TOO_LARGE = re.compile(r"[Rr]eceived message larger than max \((\d+) vs\. (\d+)\)")
# In a call's initial metadata: its server is there and works on it.
ACCEPTED_KEY = "kvferry-accepted"
_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
_ANY_LENGTH = (("grpc.max_receive_message_length", -1),)
# KV frames: fewer, larger HTTP/2 frames and reads.
_BULK_OPTIONS = (
    ("grpc.http2.max_frame_size", 4 << 20),
    ("grpc.http2.lookahead_bytes", 8 << 20),
    ("grpc.experimental.tcp_read_chunk_size", 1 << 20),
    ("grpc.use_local_subchannel_pool", 1),
)


class BytesCaller(Protocol):
    async def __call__(self, data: bytes, timeout_s: float) -> None:
        """Raises the KVFerryError that the other side answers with, UnavailableError or DeadlineError."""


class Network(Protocol):
    """Where channels and servers come from: gRPC, or the simulator's in-memory network."""

    def connect(self, address: str, *, bulk: bool = False, multiplexed: bool = False) -> grpc.aio.Channel:
        """A channel to host:port; `bulk` ones do not share a connection with small calls. `multiplexed`: for a stub of
        what `add_multiplexed` added there, many of whose unary calls run at once."""

    def server(
        self,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        max_message_bytes: int = -1,
        *,
        for_clients: bool = False,
    ) -> grpc.aio.Server:
        """`max_message_bytes`: of one that it is sent, before it is read; -1: any. `for_clients`: it answers others
        than the cluster's own processes, too."""

    def add_multiplexed(self, server: grpc.aio.Server, add: Callable[[S, grpc.aio.Server], None], servicer: S) -> None:
        """Let `add`, which is generated code, add the servicer for multiplexed channels and others. Once a server."""

    def bytes_caller(self, channel: grpc.aio.Channel, service: str, method: str) -> BytesCaller:
        """Calls what `answer_bytes` answers."""

    def answer_bytes(
        self, server: grpc.aio.Server, service: str, method: str, handle: Callable[[bytes], Awaitable[None]]
    ) -> None:
        """Let `handle` take the bytes of each of many small calls; its caller gets its KVFerryError."""

    async def listen(self, server: grpc.aio.Server, host: str, port: int) -> str:
        """Start `server`; its address. Port 0 takes any. Raises ConfigError when the port is in use."""


class GrpcNetwork:
    def __init__(self, tls: Membership | None = None) -> None:
        """None: in plain text, to and from anybody."""
        self._tls = tls

    def connect(self, address: str, *, bulk: bool = False, multiplexed: bool = False) -> grpc.aio.Channel:
        channel = self._channel(address, _OPTIONS + _ANY_LENGTH + (_BULK_OPTIONS if bulk else ()))
        return cast(grpc.aio.Channel, MultiplexedChannel(channel)) if multiplexed else channel

    def _channel(self, address: str, options: Sequence[tuple[str, Any]]) -> grpc.aio.Channel:
        if self._tls is None:
            return grpc.aio.insecure_channel(address, options=options)
        # Whoever is of the cluster answers to its name, at whatever address.
        named = (*options, ("grpc.ssl_target_name_override", self._tls.name))
        connect = functools.partial(grpc.aio.secure_channel, address, options=named)
        return cast(
            grpc.aio.Channel, RotatingChannel(self._tls.files, lambda credentials: connect(credentials=credentials))
        )

    def server(
        self,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        max_message_bytes: int = -1,
        *,
        for_clients: bool = False,
    ) -> grpc.aio.Server:
        if self._tls is not None and not for_clients:
            interceptors = [MembersOnly(self._tls.name), *interceptors]
        limit = (("grpc.max_receive_message_length", max_message_bytes),)
        return grpc.aio.server(interceptors=interceptors, options=_OPTIONS + _BULK_OPTIONS[:-1] + limit)

    def add_multiplexed(self, server: grpc.aio.Server, add: Callable[[S, grpc.aio.Server], None], servicer: S) -> None:
        multiplexed = MultiplexService()
        add(servicer, cast(grpc.aio.Server, multiplexed))
        add(servicer, server)
        add_MultiplexServiceServicer_to_server(multiplexed, server)

    def bytes_caller(self, channel: grpc.aio.Channel, service: str, method: str) -> BytesCaller:
        return StreamedCalls(channel, service, method)

    def answer_bytes(
        self, server: grpc.aio.Server, service: str, method: str, handle: Callable[[bytes], Awaitable[None]]
    ) -> None:
        add_streamed_calls(server, service, method, handle)

    async def listen(self, server: grpc.aio.Server, host: str, port: int) -> str:
        try:
            if self._tls is None:
                bound = server.add_insecure_port(f"{host}:{port}")
            else:
                bound = server.add_secure_port(f"{host}:{port}", self._tls.server_credentials())
        except RuntimeError as exc:
            raise errors.ConfigError(
                f"cannot listen on {host}:{port}: the port is in use or the host is not this machine's; choose another"
            ) from exc
        await server.start()
        return f"{host}:{bound}"


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: KVFerryError) -> NoReturn:
    """End a server's call with this error."""
    await context.abort(error.grpc_code, error.message, error_trailers(error))


def error_trailers(error: KVFerryError) -> tuple[tuple[str, str], ...]:
    """The trailing metadata from which a caller makes the same error: its class, param, code and when to retry."""
    metadata = [(_ERROR_KEY, type(error).__name__)]
    metadata += [(key, value) for key, value in ((_PARAM_KEY, error.param), (_CODE_KEY, error.code)) if value]
    if isinstance(error, errors.OverloadedError):
        metadata.append((_RETRY_KEY, f"{error.retry_after_s:.3f}"))
    return tuple(metadata)


def error_from_rpc(exc: grpc.RpcError) -> KVFerryError:
    """The typed error behind a failed call, of an async or a sync stub."""
    assert isinstance(exc, (grpc.aio.AioRpcError, grpc.Call))
    metadata = dict(exc.trailing_metadata() or ())
    details = exc.details() or exc.code().name
    name = metadata.get(_ERROR_KEY)
    if too_large := _TOO_LARGE.search(details):
        return errors.InvalidRequestError(
            f"the request has {too_large[1]} bytes; the router takes {too_large[2]} (router.max_body_bytes): send it "
            "in parts, or a large job as a file to /v1/files and /v1/batches"
        )
    cls = errors.BY_NAME.get(str(name)) or _BY_STATUS.get(exc.code(), KVFerryError)
    error = cls(details, param=_text(metadata.get(_PARAM_KEY)), code=_text(metadata.get(_CODE_KEY)))
    if isinstance(error, errors.OverloadedError) and _RETRY_KEY in metadata:
        error.retry_after_s = float(metadata[_RETRY_KEY])
    return error


async def call(coroutine: Awaitable[M]) -> M:
    """Await a stub's call; raises KVFerryError instead of grpc's."""
    try:
        return await coroutine
    except grpc.aio.AioRpcError as exc:
        raise error_from_rpc(exc) from exc
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # Not this task was cancelled but the call: its channel was closed.
        raise errors.UnavailableError("the connection was closed") from None


Handler = Callable[[Any, Any, Any], Awaitable[M]]


def typed_errors(handler: Handler[M]) -> Handler[M]:
    """A servicer's method whose KVFerryErrors reach the caller with their type."""

    @functools.wraps(handler)
    async def wrapped(self: Any, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> M:
        try:
            return await handler(self, request, context)
        except KVFerryError as error:
            await abort_with(context, error)

    return wrapped


def add_bytes_method(
    server: grpc.aio.Server, service: str, method: str, handle: Callable[[bytes], Awaitable[None]]
) -> None:
    """Let `handle` take the raw bytes of each call, past protobuf; the answer is empty, or its KVFerryError."""

    async def called(data: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        try:
            await handle(data)
        except KVFerryError as error:
            await abort_with(context, error)
        return b""

    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {method: grpc.unary_unary_rpc_method_handler(called)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))


def add_bytes_stream(
    server: grpc.aio.Server, service: str, method: str, handle: Callable[[bytes], AsyncGenerator[bytes, None]]
) -> None:
    """The same with answers of many parts. `handle` is closed when its caller is gone."""

    async def called(data: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(handle(data)) as parts:
                async for part in parts:
                    yield part
        except KVFerryError as error:
            await abort_with(context, error)

    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {method: grpc.unary_stream_rpc_method_handler(called)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))


async def close_quietly(task: asyncio.Task[Any] | None) -> None:
    """Cancel a task and wait for its end, whatever that is."""
    if task is None:
        return
    if task.done():
        _ = task.cancelled() or task.exception()
        return
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _text(value: str | bytes | None) -> str | None:
    return value.decode() if isinstance(value, bytes) else value


_BY_STATUS: dict[grpc.StatusCode, type[KVFerryError]] = {
    grpc.StatusCode.UNAVAILABLE: errors.UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineError,
    grpc.StatusCode.CANCELLED: errors.AbortedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.OverloadedError,
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequestError,
    grpc.StatusCode.UNAUTHENTICATED: errors.AuthenticationError,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDeniedError,
    grpc.StatusCode.NOT_FOUND: errors.NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: errors.ConflictError,
    grpc.StatusCode.DATA_LOSS: errors.FrameError,
}
