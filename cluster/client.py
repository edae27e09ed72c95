"""The native API from Python: Client and AsyncClient, one shape, typed errors, neither torch nor ray.

with Client() as client:
    print(client.generate("The capital of France is", max_tokens=8).text)
    for chunk in client.stream([{"role": "user", "content": "Hello!"}]):
        print(chunk.text, end="")
"""

from __future__ import annotations

import asyncio
import time
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
    completion_of,
)
from cluster.resume import Answering, Target
from protos import router_pb2 as pb
from protos.router_pb2_grpc import RouterServiceStub

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
    # A machine that is gone says nothing, and a router that is started anew is there soon.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


class Client:
    """Blocking. One per process is enough; safe to share between threads."""

    def __init__(self, target: str = DEFAULT_TARGET, *, api_key: str | None = None) -> None:
        """`api_key`: None: what KVFERRY_API_KEY says, if anything."""
        self.target = target
        self._router = Target(target, api_key)
        self._channel = grpc.insecure_channel(target, options=_OPTIONS)
        self._stub = RouterServiceStub(self._channel)

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """Wait for the whole answer. Raises KVFerryError."""
        with closing(self.stream(prompt, **options)) as chunks:
            return completion_of(list(chunks))

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Generator[Chunk]:
        """The answer as it comes; closing the iterator cancels the request. Raises KVFerryError."""
        answering = Answering(prompt, options, self._router)
        while not answering.ended:
            call = self._stub.Generate(
                answering.request, timeout=answering.time_left_s(), metadata=self._router.metadata
            )
            try:
                for message in call:
                    yield answering.take(message)
                answering.require_end()
            except grpc.RpcError as exc:
                pause_s = answering.pause_s(exc)
            else:
                return
            finally:
                call.cancel()
            time.sleep(pause_s)

    def status(self, timeout_s: float = _STATUS_TIMEOUT_S) -> pb.GetStatusResponse:
        try:
            answer = self._stub.GetStatus(pb.GetStatusRequest(), timeout=timeout_s, metadata=self._router.metadata)
        except grpc.RpcError as exc:
            raise self._router.error(exc) from None
        self._router.heard = True
        return answer

    def audit(self, timeout_s: float = _STATUS_TIMEOUT_S) -> pb.AuditRouterResponse:
        """Who owns which block, and which requests the router waits for (cluster/verify.py)."""
        try:
            return self._stub.AuditRouter(pb.AuditRouterRequest(), timeout=timeout_s, metadata=self._router.metadata)
        except grpc.RpcError as exc:
            raise self._router.error(exc) from None

    def trace(self, request_id: str, timeout_s: float = _STATUS_TIMEOUT_S) -> list[pb.Trace]:
        """What became of a request that runs or has lately ended. Raises NotFoundError for an id not known there."""
        try:
            answer = self._stub.GetTrace(pb.GetTraceRequest(request_id=request_id), timeout=timeout_s)
        except grpc.RpcError as exc:
            raise self._router.error(exc) from None
        return list(answer.traces)

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

    def __init__(
        self, target: str = DEFAULT_TARGET, *, api_key: str | None = None, channel: grpc.aio.Channel | None = None
    ) -> None:
        """`api_key`: None: what KVFERRY_API_KEY says, if anything. `channel`: to the target, instead of a new one; it
        is closed with the client."""
        self.target = target
        self._router = Target(target, api_key)
        self._channel = channel or grpc.aio.insecure_channel(target, options=_OPTIONS)
        self._stub: RouterServiceAsyncStub = RouterServiceStub(self._channel)

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """Wait for the whole answer. Raises KVFerryError."""
        async with aclosing(self.stream(prompt, **options)) as chunks:
            return completion_of([chunk async for chunk in chunks])

    async def stream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncGenerator[Chunk]:
        """The answer as it comes; closing the iterator cancels the request. Raises KVFerryError."""
        answering = Answering(prompt, options, self._router, asyncio.get_running_loop().time)
        while not answering.ended:
            call = self._stub.Generate(
                answering.request, timeout=answering.time_left_s(), metadata=self._router.metadata
            )
            try:
                async for message in call:
                    yield answering.take(message)
                answering.require_end()
            except grpc.aio.AioRpcError as exc:
                pause_s = answering.pause_s(exc)
            else:
                return
            finally:
                call.cancel()
            await asyncio.sleep(pause_s)

    async def status(self, timeout_s: float = _STATUS_TIMEOUT_S) -> pb.GetStatusResponse:
        try:
            answer = await self._stub.GetStatus(
                pb.GetStatusRequest(), timeout=timeout_s, metadata=self._router.metadata
            )
        except grpc.aio.AioRpcError as exc:
            raise self._router.error(exc) from None
        self._router.heard = True
        return answer

    async def trace(self, request_id: str, timeout_s: float = _STATUS_TIMEOUT_S) -> list[pb.Trace]:
        """What became of a request that runs or has lately ended. Raises NotFoundError for an id not known there."""
        try:
            answer = await self._stub.GetTrace(pb.GetTraceRequest(request_id=request_id), timeout=timeout_s)
        except grpc.aio.AioRpcError as exc:
            raise self._router.error(exc) from None
        return list(answer.traces)

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
