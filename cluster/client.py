"""The native API from Python: Client and AsyncClient, one shape, typed errors, neither torch nor ray.

with Client() as client:
    print(client.generate("The capital of France is", max_tokens=8).text)
    for chunk in client.stream([{"role": "user", "content": "Hello!"}]):
        print(chunk.text, end="")
    for answer in client.map(["One", "Two"], max_tokens=8, progress=True):
        print(answer.text)
    job = client.submit("prompts.jsonl", max_tokens=8)
    for result in job.results():
        print(result.index, result.completion, result.error)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Generator, Iterable
from contextlib import aclosing, closing
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack

import grpc
import grpc.aio

from cluster.async_jobs import AsyncJob, AsyncJobs
from cluster.client_tls import Tls
from cluster.connection import AsyncConnection, Calls, Connection
from cluster.job_records import JobInfo, JobResult
from cluster.jobs import Job, Jobs
from cluster.mapping import Outcome, amap_in_order, map_in_order
from cluster.records import (
    Chunk,
    Completion,
    Options,
    Prompt,
    Sampling,
    Usage,
    completion_of,
)
from cluster.resume import Answering
from protos import router_pb2 as pb
from workers.errors import KVFerryError

__all__ = [
    "DEFAULT_TARGET",
    "AsyncClient",
    "AsyncJob",
    "Chunk",
    "Client",
    "Completion",
    "Job",
    "JobInfo",
    "JobResult",
    "Options",
    "Prompt",
    "Sampling",
    "Usage",
    "completion_of",
]

DEFAULT_TARGET = "127.0.0.1:8001"
_STATUS_TIMEOUT_S = 10.0
_MAX_IN_FLIGHT = 16


class Client:
    """Blocking. One per process is enough; safe to share between threads."""

    def __init__(self, target: str = DEFAULT_TARGET, *, tls: Tls | None = None, api_key: str | None = None) -> None:
        """`target`: host:port, or several with commas between: where one dies, it goes on at another.

        `tls`: a folder with ca.crt, tls.crt and tls.key, as a cluster with security.tls asks for; or only whom to
        trust: a file of certificates (PEM), or True for those of this machine. None: what KVFERRY_TLS names, if
        anything, else plain text.
        `api_key`: None: what KVFERRY_API_KEY says, if anything.
        """
        self.target = target
        self._connection = Connection(target, tls, api_key)
        self.jobs = Jobs(self._connection)

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """Wait for the whole answer. Raises KVFerryError."""
        return self._generate(prompt, options, Calls())

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Generator[Chunk]:
        """The answer as it comes; closing the iterator cancels the request. Raises KVFerryError."""
        return self._stream(prompt, options, Calls())

    def map(
        self,
        prompts: Iterable[Prompt],
        max_in_flight: int = _MAX_IN_FLIGHT,
        *,
        progress: bool = False,
        **options: Unpack[Options],
    ) -> Generator[Completion]:
        """Their whole answers in their order, so many prompts at once; closing the iterator cancels the rest. Raises
        KVFerryError in the place of an answer; to go on after one, submit a job."""
        calls = Calls()
        outcomes = map_in_order(
            lambda prompt: self._generate(prompt, options, calls),
            prompts,
            max_in_flight,
            progress,
            calls.cancel,
        )
        with closing(outcomes):
            for outcome in outcomes:
                yield _answer_of(outcome)

    def submit(self, prompts: Iterable[Prompt] | str | Path, **options: Unpack[Options]) -> Job:
        """A durable job, on disk when this returns. A string is the path of a JSONL file, each line of which is
        {"prompt": ...} or {"messages": [...]} with options of its own beside it. Raises KVFerryError."""
        return self.jobs.submit(prompts, **options)

    def status(self, timeout_s: float = _STATUS_TIMEOUT_S) -> pb.GetStatusResponse:
        request, metadata = pb.GetStatusRequest(), self._connection.metadata
        return self._connection.call(
            lambda stubs, timeout_s: stubs.router.GetStatus(request, timeout=timeout_s, metadata=metadata),
            timeout_s,
            rounds=1,
        )

    def audit(self, timeout_s: float = _STATUS_TIMEOUT_S) -> pb.AuditRouterResponse:
        """Who owns which block, and which requests the router waits for (cluster/verify.py)."""
        request, metadata = pb.AuditRouterRequest(), self._connection.metadata
        return self._connection.call(
            lambda stubs, timeout_s: stubs.router.AuditRouter(request, timeout=timeout_s, metadata=metadata),
            timeout_s,
            rounds=1,
        )

    def trace(self, request_id: str, timeout_s: float = _STATUS_TIMEOUT_S) -> list[pb.Trace]:
        """What became of a request that runs or has lately ended. Raises NotFoundError for an id not known there."""
        request, metadata = pb.GetTraceRequest(request_id=request_id), self._connection.metadata
        answer = self._connection.call(
            lambda stubs, timeout_s: stubs.router.GetTrace(request, timeout=timeout_s, metadata=metadata),
            timeout_s,
            rounds=1,
        )
        return list(answer.traces)

    def close(self) -> None:
        self.jobs.close()
        self._connection.close()

    def _generate(self, prompt: Prompt, options: Options, calls: Calls) -> Completion:
        with closing(self._stream(prompt, options, calls)) as chunks:
            return completion_of(list(chunks))

    def _stream(self, prompt: Prompt, options: Options, calls: Calls) -> Generator[Chunk]:
        connection = self._connection
        answering = Answering(prompt, options, connection.routers)
        patience = answering.patience
        with connection.routers.in_use():
            while not answering.ended:
                stub = connection.stubs[patience.at].router
                call = stub.Generate(answering.request, timeout=patience.time_left_s(), metadata=connection.metadata)
                calls.add(call)
                try:
                    for message in call:
                        yield answering.take(message)
                    answering.require_end()
                except grpc.RpcError as exc:
                    pause_s = patience.pause_s(exc)
                else:
                    return
                finally:
                    calls.discard(call)
                    call.cancel()
                time.sleep(pause_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """Client for asyncio; to be made inside the running loop."""

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        tls: Tls | None = None,
        api_key: str | None = None,
        channel: grpc.aio.Channel | None = None,
    ) -> None:
        """As Client. `channel`: to the target, instead of a new one; it is closed with the client."""
        self.target = target
        self._connection = AsyncConnection(target, tls, api_key, channel)
        self.jobs = AsyncJobs(self._connection)

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """Wait for the whole answer. Raises KVFerryError."""
        async with aclosing(self.stream(prompt, **options)) as chunks:
            return completion_of([chunk async for chunk in chunks])

    async def stream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncGenerator[Chunk]:
        """The answer as it comes; closing the iterator cancels the request. Raises KVFerryError."""
        connection = self._connection
        answering = Answering(prompt, options, connection.routers, asyncio.get_running_loop().time)
        patience = answering.patience
        with connection.routers.in_use():
            while not answering.ended:
                stub = connection.stubs[patience.at].router
                call = stub.Generate(answering.request, timeout=patience.time_left_s(), metadata=connection.metadata)
                try:
                    async for message in call:
                        yield answering.take(message)
                    answering.require_end()
                except grpc.aio.AioRpcError as exc:
                    pause_s = patience.pause_s(exc)
                else:
                    return
                finally:
                    call.cancel()
                await asyncio.sleep(pause_s)

    async def map(
        self,
        prompts: Iterable[Prompt],
        max_in_flight: int = _MAX_IN_FLIGHT,
        *,
        progress: bool = False,
        **options: Unpack[Options],
    ) -> AsyncGenerator[Completion]:
        """As Client.map."""
        outcomes = amap_in_order(lambda prompt: self.generate(prompt, **options), prompts, max_in_flight, progress)
        async with aclosing(outcomes):
            async for outcome in outcomes:
                yield _answer_of(outcome)

    async def submit(self, prompts: Iterable[Prompt] | str | Path, **options: Unpack[Options]) -> AsyncJob:
        """As Client.submit."""
        return await self.jobs.submit(prompts, **options)

    async def status(self, timeout_s: float = _STATUS_TIMEOUT_S) -> pb.GetStatusResponse:
        request, metadata = pb.GetStatusRequest(), self._connection.metadata
        return await self._connection.call(
            lambda stubs, timeout_s: stubs.router.GetStatus(request, timeout=timeout_s, metadata=metadata),
            timeout_s,
            rounds=1,
        )

    async def audit(self, timeout_s: float = _STATUS_TIMEOUT_S) -> pb.AuditRouterResponse:
        """As Client.audit."""
        request, metadata = pb.AuditRouterRequest(), self._connection.metadata
        return await self._connection.call(
            lambda stubs, timeout_s: stubs.router.AuditRouter(request, timeout=timeout_s, metadata=metadata),
            timeout_s,
            rounds=1,
        )

    async def trace(self, request_id: str, timeout_s: float = _STATUS_TIMEOUT_S) -> list[pb.Trace]:
        """What became of a request that runs or has lately ended. Raises NotFoundError for an id not known there."""
        request, metadata = pb.GetTraceRequest(request_id=request_id), self._connection.metadata
        answer = await self._connection.call(
            lambda stubs, timeout_s: stubs.router.GetTrace(request, timeout=timeout_s, metadata=metadata),
            timeout_s,
            rounds=1,
        )
        return list(answer.traces)

    async def close(self) -> None:
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _answer_of(outcome: Outcome) -> Completion:
    if isinstance(outcome, KVFerryError):
        raise outcome
    return outcome
