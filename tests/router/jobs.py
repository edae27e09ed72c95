"""A RouterServer with durable jobs over a router that answers from the prompt, and the stub to ask it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import grpc.aio
import xxhash

from protos import router_pb2 as pb
from protos import router_pb2_grpc
from router.config import JobsConfig, RouterConfig
from router.router import Router
from router.server import RouterServer
from tests.router.scripted import ScriptedRouter, StaticPool, smollm
from tests.router.serving import MODEL
from workers.request import NO_TERMS, FinishReason, SamplingParams, Terms, TokenOutput
from workers.timeline import Timeline

if TYPE_CHECKING:
    from protos.router_pb2_grpc import JobServiceAsyncStub

TIMELINE = Timeline(queued_s=0.5, prefill_s=0.25, decode_s=0.125)


def token_of(prompt: Sequence[int], seed: int) -> int:
    """What EchoRouter answers."""
    return xxhash.xxh64_intdigest(f"{list(prompt)} {seed}".encode()) % 49_000


@dataclass
class EchoRouter(ScriptedRouter):
    """One token, a function of prompt and seed, with a permit that it takes. Before that each call takes one of
    `errors` to raise, until none is left."""

    steps: Sequence[Any] = ()
    incarnation: str = field(default_factory=lambda: uuid.uuid4().hex)
    permits: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    errors: list[Exception] = field(default_factory=list)
    most_running: int = 0

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str,
        cache_salt: str = "",
        so_far: Mapping[int, Sequence[int]] | None = None,
        terms: Terms = NO_TERMS,
    ) -> AsyncGenerator[TokenOutput, None]:
        self.calls.append((list(prompt_token_ids), params, request_id))
        self.terms.append(terms)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await self.permits.acquire()
            # Long enough for others to come meanwhile.
            await asyncio.sleep(0.005)
            if self.errors:
                raise self.errors.pop(0)
            token = token_of(prompt_token_ids, params.seed or 0)
            yield TokenOutput(request_id, 0, (token,), FinishReason.LENGTH, TIMELINE)
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted.append(request_id)
            raise
        finally:
            self.num_running -= 1


def open_router() -> EchoRouter:
    return EchoRouter(permits=asyncio.Semaphore(1_000_000))


@dataclass
class Served:
    router: EchoRouter
    server: RouterServer
    jobs: JobServiceAsyncStub

    async def submit(self, prompts: Sequence[str], job_id: str = "", **params: Any) -> pb.Job:
        requests = [pb.GenerateRequest(text=prompt) for prompt in prompts]
        for request in requests:
            for name, value in params.items():
                setattr(request.params, name, value)
        return (await self.jobs.SubmitJob(pb.SubmitJobRequest(job_id=job_id, requests=requests))).job

    async def job(self, job_id: str) -> pb.Job:
        return (await self.jobs.GetJob(pb.GetJobRequest(job_id=job_id))).job

    async def results(self, job_id: str, start: int = 0) -> list[pb.JobResult]:
        """To the job's end."""
        call = self.jobs.JobResults(pb.JobResultsRequest(job_id=job_id, start=start))
        return [result async for message in call for result in message.results]


def jobs_config(folder: Path, **settings: Any) -> JobsConfig:
    return JobsConfig.model_validate({"url": f"sqlite:///{folder}/jobs.sqlite", "lease_s": 1.0} | settings)


@asynccontextmanager
async def serving_jobs(router: EchoRouter, config: JobsConfig, **settings: Any) -> AsyncIterator[Served]:
    """`settings`: of RouterConfig."""
    ports = RouterConfig(http_port=0, grpc_port=0, **settings)
    server = RouterServer(cast(Router, router), StaticPool(), smollm(), MODEL, ports, jobs=config)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
            yield Served(router, server, router_pb2_grpc.JobServiceStub(channel))
    finally:
        await server.stop()
