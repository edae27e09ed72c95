"""What handing over costs a real model: 1P1D, each worker on a core of its own."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

import grpc.aio

from cluster.bench.transfer.far_side import pin, until_closed
from cluster.bench.transfer.ways import handed_over, new_request, reserve
from cluster.config import load_config
from protos import worker_pb2, worker_pb2_grpc
from workers.config import EngineConfig, Role, WorkerConfig
from workers.request import Request, SamplingParams, TokenOutput
from workers.rpc import GrpcNetwork
from workers.wire import output_from_pb
from workers.worker import Worker

_ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)
_TWO_TOKENS = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)


def serve_model(connection: Connection) -> None:
    pin(-1)
    asyncio.run(_serve(connection))


async def _serve(connection: Connection) -> None:
    worker = await _start_worker("decode")
    connection.send({"decode": worker.address})
    await until_closed(connection)
    await worker.stop()


async def _start_worker(role: Role) -> Worker:
    settings = load_config(None).model_dump(include=set(EngineConfig.model_fields))
    cores = tuple(os.sched_getaffinity(0))
    worker = Worker(WorkerConfig(**{**settings, "role": role, "enable_prefix_caching": False, "cpu_affinity": cores}))
    await worker.start()
    return worker


@dataclass(frozen=True)
class Spent:
    """Seconds by the clock, and of this process's core: what else the machine does is in the first only."""

    wall_s: float
    cpu_s: float

    def __sub__(self, other: Spent) -> Spent:
        return Spent(self.wall_s - other.wall_s, self.cpu_s - other.cpu_s)


def now() -> Spent:
    return Spent(time.perf_counter(), time.process_time())


class Ferry:
    """A prefill worker here, the decode worker there, and their router's part."""

    def __init__(self, prefill: Worker, channel: grpc.aio.Channel) -> None:
        self._prefill = prefill
        self._stub = worker_pb2_grpc.WorkerServiceStub(channel)
        self._ends: dict[str, asyncio.Future[TokenOutput]] = {}

    async def compute(self, num_prompts: int, num_tokens: int) -> Spent:
        """Until token 1 of so many prompts, computed for nobody."""
        requests = [_prompt(num_tokens, _ONE_TOKEN) for _ in range(num_prompts)]
        began = now()
        for request in requests:
            self._prefill.submit(request)
        await asyncio.gather(*(self._end(request) for request in requests))
        return now() - began

    async def hand_over(self, num_prompts: int, num_tokens: int) -> Spent:
        """The same, while their KV is handed over."""
        requests = [_prompt(num_tokens, _TWO_TOKENS) for _ in range(num_prompts)]
        grants = [await reserve(self._stub, request) for request in requests]
        began = now()
        await asyncio.gather(*map(self._prefill.prefill, requests, grants))
        spent = now() - began
        for request in requests:
            await handed_over(request)
            await self._end(request)
        return spent

    async def unhidden_share(self, num_tokens: int) -> tuple[float, float]:
        """Seconds from arrival to token 2, and the part of them in which only the hand-off went on."""
        request = _prompt(num_tokens, _TWO_TOKENS)
        began = time.perf_counter()
        await self._prefill.prefill(request, await reserve(self._stub, request))
        output = await self._end(request)
        seconds = time.perf_counter() - began
        assert output.timeline is not None
        return seconds, output.timeline.transfer_unhidden_s / seconds

    async def listen_here(self) -> None:
        async for step in self._prefill.outputs.stream("bench"):
            self._note(step)

    async def listen_there(self) -> None:
        async for step in self._stub.StreamOutputs(worker_pb2.StreamOutputsRequest(router_id="bench")):
            self._note(list(map(output_from_pb, step.outputs)))

    def _note(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            if output.finish_reason is not None:
                self._ended(output.request_id).set_result(output)

    async def _end(self, request: Request) -> TokenOutput:
        return await self._ended(request.request_id)

    def _ended(self, request_id: str) -> asyncio.Future[TokenOutput]:
        return self._ends.setdefault(request_id, asyncio.get_running_loop().create_future())


@asynccontextmanager
async def open_ferry(address: str) -> AsyncIterator[Ferry]:
    prefill = await _start_worker("prefill")
    async with GrpcNetwork().connect(address) as channel:
        ferry = Ferry(prefill, channel)
        listening = [asyncio.create_task(ferry.listen_here()), asyncio.create_task(ferry.listen_there())]
        try:
            yield ferry
        finally:
            for task in listening:
                task.cancel()
            await prefill.stop()


async def measure_model(address: str, num_rounds: int) -> dict[str, float]:
    """Medians over rounds; a slowdown is that of a hand-off and a computation right after each other."""
    async with open_ferry(address) as ferry:
        await ferry.hand_over(1, 64)
        slower, dearer, shares, seconds = [], [], [], []
        for _ in range(num_rounds):
            alone, sending = await ferry.compute(2, 512), await ferry.hand_over(2, 512)
            slower.append(sending.wall_s / alone.wall_s - 1)
            dearer.append(sending.cpu_s / alone.cpu_s - 1)
            token_2_s, share = await ferry.unhidden_share(1024)
            seconds.append(token_2_s)
            shares.append(share)
    return {
        "prefill_slower": statistics.median(slower),
        "prefill_more_cpu_time": statistics.median(dearer),
        "arrival_to_token_2_s": statistics.median(seconds),
        "unhidden_share": statistics.median(shares),
    }


def _prompt(num_tokens: int, params: SamplingParams) -> Request:
    return new_request([random.randrange(1000, 20_000) for _ in range(num_tokens)], params)
