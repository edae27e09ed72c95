"""What the router costs beside an empty FastAPI app: `python -m cluster.bench.router` (or `make bench-router`).

Workers without a model answer at once, in a process of their own, over real gRPC. The router's process has one core to
itself; workers and clients have another. On a machine with other work, CPU seconds tell more than the clock: figures "a
CPU second" are of the router's process, all of its threads. The last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from dataclasses import dataclass, replace

import click
import grpc.aio
from rich.console import Console
from rich.table import Table

from cluster.bench.router.load import Result, Shape, load
from cluster.bench.router.processes import Served, process, serve_empty_app, serve_router, serve_stubs
from protos import worker_pb2, worker_pb2_grpc

# Between tokens of an answer, where answers are counted.
_STEP_S = 0.004
_NUM_CLIENTS = 128
_COLUMNS = ("what", "router", "empty app", "ratio", "goal")


@dataclass(frozen=True, slots=True)
class Run:
    result: Result
    num_tokens: int
    cpu_s: float

    @property
    def per_s(self) -> float:
        return self.result.num_requests / self.result.seconds

    @property
    def per_cpu_s(self) -> float:
        return self.result.num_requests / self.cpu_s

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.result.seconds

    @property
    def tokens_per_cpu_s(self) -> float:
        return self.num_tokens / self.cpu_s


def measure(served: Served, shape: Shape) -> Run:
    # The first requests find everything cold.
    asyncio.run(load(served.said, replace(shape, num_requests=shape.num_clients)))
    cpu_s = served.cpu_s()
    result = asyncio.run(load(served.said, shape))
    return Run(result, shape.num_requests * shape.max_tokens, served.cpu_s() - cpu_s)


async def prefill_s(address: str, count: int) -> float:
    """Median seconds of a worker's answer without a router."""
    seconds = []
    request = worker_pb2.Request(request_id="r", params=worker_pb2.SamplingParams(max_tokens=1))
    async with grpc.aio.insecure_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        for _ in range(count):
            began_s = time.perf_counter()
            await stub.Prefill(worker_pb2.PrefillRequest(request=request))
            seconds.append(time.perf_counter() - began_s)
    return statistics.median(seconds)


def compare(served: Served, empty: Served, shape: Shape) -> tuple[Run, Run]:
    """Each in turn and the better of two, so that whatever else the machine does hits both alike."""
    runs = [measure(one, shape) for one in (served, empty, served, empty)]
    router, app = (max(runs[at::2], key=lambda one: one.per_cpu_s) for at in (0, 1))
    return router, app


def ttft_ms(served: Served, count: int) -> float:
    """Median, of one stream at a time."""
    shape = Shape(count, num_clients=1, max_tokens=2, stream=True)
    return 1000 * statistics.median(measure(served, shape).result.ttft_s)


class Report:
    """What was found, as a table and as numbers by name."""

    def __init__(self) -> None:
        self.table = Table(*_COLUMNS, box=None)
        self.found: dict[str, float] = {}

    def add(self, name: str, what: str, router: float, empty: float | None = None, goal: str = "") -> None:
        self.found[name] = round(router, 3)
        shown = ("", "") if empty is None else (f"{empty:,.2f}", f"{router / empty:.2f}")
        if empty is not None:
            self.found[f"{name}_ratio"] = round(router / empty, 3)
        self.table.add_row(what, f"{router:,.2f}", *shown, goal)

    def add_answers(self, name: str, what: str, router: Run, empty: Run) -> None:
        self.add(f"{name}_per_s", f"{what} a second", router.per_s, empty.per_s)
        self.add(f"{name}_per_cpu_s", f"{what} a CPU second", router.per_cpu_s, empty.per_cpu_s, "ratio over 0.5")
        self.add(f"{name}_cpu_ms", "  CPU ms of each", 1000 / router.per_cpu_s, 1000 / empty.per_cpu_s)


@click.command()
@click.option("--requests", default=1000, show_default=True, help="Short answers of each kind.")
@click.option("--streams", default=200, show_default=True, help="Running at once, when tokens are relayed.")
@click.option("--tokens", default=300, show_default=True, help="Of each of these streams.")
@click.option("--step-ms", default=8.0, show_default=True, help="Between two steps of the decode worker then.")
def main(requests: int, streams: int, tokens: int, step_ms: float) -> None:
    """Measure the router over workers that answer at once, and an empty app beside it."""
    cores = sorted(os.sched_getaffinity(0))
    ours, theirs = cores[0], cores[-1]
    os.sched_setaffinity(0, {theirs})
    report = Report()
    with (
        process(theirs, serve_stubs, _STEP_S) as stubs,
        process(ours, serve_empty_app, _STEP_S) as empty,
        process(ours, serve_router, stubs.said) as served,
    ):
        for name, num_tokens, stream in (
            ("whole_16", 16, False),
            ("streamed_16", 16, True),
            ("streamed_128", 128, True),
        ):
            shape = Shape(max(2 * _NUM_CLIENTS, requests * 16 // num_tokens), _NUM_CLIENTS, num_tokens, stream)
            what = f"{name.partition('_')[0]} answers of {num_tokens} tokens"
            report.add_answers(name, what, *compare(served, empty, shape))
        alone_ms = 1000 * asyncio.run(prefill_s(stubs.said[0], 200))
        first_ms = ttft_ms(served, 200)
        report.add("ttft_ms", "ms to the first byte, p50", first_ms, ttft_ms(empty, 200))
        report.add("ttft_added_ms", "  of these more than the worker's", first_ms - alone_ms, None, "under 3")
    with process(theirs, serve_stubs, step_ms / 1000) as stubs, process(ours, serve_router, stubs.said) as served:
        relayed = measure(served, Shape(streams, streams, tokens, stream=True))
    offered = 1000 * streams / step_ms
    report.add("relay_tokens_per_s", f"tokens relayed a second, of {offered:,.0f} at most", relayed.tokens_per_s)
    report.add("relay_tokens_per_cpu_s", "tokens relayed a CPU second", relayed.tokens_per_cpu_s, None, "over 20,000")
    Console().print(report.table)
    click.echo(json.dumps(report.found))


if __name__ == "__main__":
    main()
