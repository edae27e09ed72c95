"""The native API from Python: Client and AsyncClient, one shape, typed errors, neither torch nor ray.

with Client() as client:
    print(client.generate("The capital of France is", max_tokens=8).text)
    for chunk in client.stream([{"role": "user", "content": "Hello!"}]):
        print(chunk.text, end="")
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, closing
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

import grpc
import grpc.aio

from cluster.records import (
    Chunk,
    Completion,
    Options,
    Prompt,
    Sampling,
    Usage,
    build_request,
    chunk_from_pb,
    completion_of,
)
from protos import router_pb2 as pb
from protos.router_pb2_grpc import RouterServiceStub
from workers.errors import KVFerryError, UnavailableError
from workers.rpc import error_from_rpc

if TYPE_CHECKING:
    from protos.router_pb2_grpc import RouterServiceAsyncStub

__all__ = [
    "DEFAULT_TARGET",
    "AsyncClient",
    "Chunk",
    "Client",
    "Completion",
    "Options",
    "Prompt",
    "Sampling",
    "Usage",
    "completion_of",
]

DEFAULT_TARGET = "127.0.0.1:8001"
_STATUS_TIMEOUT_S = 10.0
_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.primary_user_agent", "kvferry"),
)


def _require_end(num_ended: int, options: Options) -> None:
    if num_ended < (options.get("n") or 1):
        raise UnavailableError("the answer ended without a finish reason; the router may have stopped: try again")


def _error(exc: grpc.RpcError, target: str) -> KVFerryError:
    error = error_from_rpc(exc)
    assert isinstance(exc, (grpc.Call, grpc.aio.AioRpcError))
    if isinstance(error, UnavailableError) and "kvferry-error" not in dict(exc.trailing_metadata() or ()):
        return UnavailableError(f"no router answers at {target}; start one with `kvferry up`, or give its target")
    return error


class Client:
    """Blocking. One per process is enough; safe to share between threads."""

    def __init__(self, target: str = DEFAULT_TARGET) -> None:
        self.target = target
        self._channel = grpc.insecure_channel(target, options=_OPTIONS)
        self._stub = RouterServiceStub(self._channel)

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """Wait for the whole answer. Raises KVFerryError."""
        with closing(self.stream(prompt, **options)) as chunks:
            return completion_of(list(chunks))

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Generator[Chunk]:
        """The answer as it comes; closing the iterator cancels the request. Raises KVFerryError."""
        call = self._stub.Generate(build_request(prompt, options), timeout=options.get("timeout_s"))
        num_ended = 0
        try:
            for message in call:
                chunk = chunk_from_pb(message)
                num_ended += chunk.finish_reason is not None
                yield chunk
            _require_end(num_ended, options)
        except grpc.RpcError as exc:
            raise _error(exc, self.target) from None
        finally:
            call.cancel()

    def status(self, timeout_s: float = _STATUS_TIMEOUT_S) -> pb.GetStatusResponse:
        try:
            return self._stub.GetStatus(pb.GetStatusRequest(), timeout=timeout_s)
        except grpc.RpcError as exc:
            raise _error(exc, self.target) from None

    def audit(self, timeout_s: float = _STATUS_TIMEOUT_S) -> pb.AuditRouterResponse:
        """Who owns which block, and which requests the router waits for (cluster/verify.py)."""
        try:
            return self._stub.AuditRouter(pb.AuditRouterRequest(), timeout=timeout_s)
        except grpc.RpcError as exc:
            raise _error(exc, self.target) from None

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """Client for asyncio; to be made inside the running loop."""

    def __init__(self, target: str = DEFAULT_TARGET) -> None:
        self.target = target
        self._channel = grpc.aio.insecure_channel(target, options=_OPTIONS)
        self._stub: RouterServiceAsyncStub = RouterServiceStub(self._channel)

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """Wait for the whole answer. Raises KVFerryError."""
        async with aclosing(self.stream(prompt, **options)) as chunks:
            return completion_of([chunk async for chunk in chunks])

    async def stream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncGenerator[Chunk]:
        """The answer as it comes; closing the iterator cancels the request. Raises KVFerryError."""
        call = self._stub.Generate(build_request(prompt, options), timeout=options.get("timeout_s"))
        num_ended = 0
        try:
            async for message in call:
                chunk = chunk_from_pb(message)
                num_ended += chunk.finish_reason is not None
                yield chunk
            _require_end(num_ended, options)
        except grpc.aio.AioRpcError as exc:
            raise _error(exc, self.target) from None
        finally:
            call.cancel()

    async def status(self, timeout_s: float = _STATUS_TIMEOUT_S) -> pb.GetStatusResponse:
        try:
            return await self._stub.GetStatus(pb.GetStatusRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as exc:
            raise _error(exc, self.target) from None

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
