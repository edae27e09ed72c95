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
from dataclasses import dataclass

import click
import grpc.aio
from rich.console import Console
from rich.table import Table

from cluster.bench.router.load import Result, load
from cluster.bench.router.processes import Served, process, serve_empty_app, serve_router, serve_stubs
from protos import worker_pb2, worker_pb2_grpc

_SHORT = 16
_GOALS = {"requests": 0.5, "relayed_tokens_per_s": 20_000.0, "ttft_added_ms": 3.0}


@dataclass(frozen=True, slots=True)
class Run:
    result: Result
    cpu_s: float

    @property
    def per_s(self) -> float:
        return self.result.num_requests / self.result.seconds

    @property
    def per_cpu_s(self) -> float:
        return self.result.num_requests / self.cpu_s

    @property
    def events_per_s(self) -> float:
        return self.result.num_events / self.result.seconds

    @property
    def events_per_cpu_s(self) -> float:
        return self.result.num_events / self.cpu_s


def measure(served: Served, *, num_requests: int, num_clients: int, max_tokens: int, stream: bool) -> Run:
    settings = {"num_clients": num_clients, "max_tokens": max_tokens, "stream": stream}
    # The first requests find everything cold.
    asyncio.run(load(served.said, num_requests=num_clients, **settings))
    cpu_s = served.cpu_s()
    result = asyncio.run(load(served.said, num_requests=num_requests, **settings))
    return Run(result, served.cpu_s() - cpu_s)


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


def compare(served: Served, empty: Served, num_requests: int, stream: bool) -> tuple[Run, Run]:
    """Each in turn, so that whatever else the machine does hits both alike."""
    shape = {"num_clients": 32, "max_tokens": _SHORT, "stream": stream}
    runs = [measure(one, num_requests=num_requests, **shape) for one in (served, empty, served, empty)]
    best = [max(runs[at::2], key=lambda run: run.per_cpu_s) for at in (0, 1)]
    return best[0], best[1]


def ttft_ms(served: Served, count: int) -> float:
    """Median, of one stream at a time."""
    run = measure(served, num_requests=count, num_clients=1, max_tokens=2, stream=True)
    return 1000 * statistics.median(run.result.ttft_s)


@click.command()
@click.option("--requests", default=1500, show_default=True, help="Of each kind of short answer.")
@click.option("--streams", default=200, show_default=True, help="Running at once, when tokens are relayed.")
@click.option("--tokens", default=400, show_default=True, help="Of each of these streams.")
@click.option("--step-ms", default=8.0, show_default=True, help="Between two steps of the decode worker then.")
def main(requests: int, streams: int, tokens: int, step_ms: float) -> None:
    """Measure the router over workers that answer at once, and an empty app beside it."""
    cores = sorted(os.sched_getaffinity(0))
    ours, theirs = cores[0], cores[-1]
    os.sched_setaffinity(0, {theirs})
    found: dict[str, float] = {}
    table = Table("what", "router", "empty app", "ratio", "goal", box=None)
    with process(theirs, serve_stubs, 0.0) as stubs, process(ours, serve_empty_app) as empty:
        with process(ours, serve_router, stubs.said) as served:
            for stream in (False, True):
                _short(table, found, *compare(served, empty, requests, stream), stream)
            alone_ms = 1000 * asyncio.run(prefill_s(stubs.said[0], 200))
            found["ttft_ms"], found["ttft_empty_ms"] = ttft_ms(served, 200), ttft_ms(empty, 200)
            found["ttft_added_ms"] = found["ttft_ms"] - alone_ms
            _row(table, "ms to the first byte, p50", found["ttft_ms"], found["ttft_empty_ms"])
            _row(table, "of these added to the worker's", found["ttft_added_ms"], None, "under 3")
    with process(theirs, serve_stubs, step_ms / 1000) as stubs, process(ours, serve_router, stubs.said) as served:
        run = measure(served, num_requests=streams, num_clients=streams, max_tokens=tokens, stream=True)
    _relayed(table, found, run, streams / step_ms * 1000)
    Console().print(table)
    click.echo(json.dumps({name: round(value, 3) for name, value in found.items()}))


def _short(table: Table, found: dict[str, float], router: Run, empty: Run, stream: bool) -> None:
    kind = "streamed" if stream else "whole"
    found[f"{kind}_requests_per_s"] = router.per_s
    found[f"{kind}_requests_ratio"] = router.per_s / empty.per_s
    found[f"{kind}_requests_per_cpu_s"] = router.per_cpu_s
    found[f"{kind}_requests_per_cpu_s_ratio"] = router.per_cpu_s / empty.per_cpu_s
    found[f"{kind}_cpu_ms"] = 1000 / router.per_cpu_s
    label = f"{kind} answers of {_SHORT} tokens"
    _row(table, f"{label} a second", router.per_s, empty.per_s, "over 0.5")
    _row(table, f"{label} a CPU second", router.per_cpu_s, empty.per_cpu_s, "over 0.5")


def _relayed(table: Table, found: dict[str, float], run: Run, offered: float) -> None:
    found["relay_offered_tokens_per_s"] = offered
    found["relay_tokens_per_s"] = run.events_per_s
    found["relay_tokens_per_cpu_s"] = run.events_per_cpu_s
    _row(table, f"tokens relayed a second, of {offered:.0f} offered", run.events_per_s, None)
    _row(table, "tokens relayed a CPU second", run.events_per_cpu_s, None, "over 20,000")


def _row(table: Table, what: str, router: float, empty: float | None, goal: str = "") -> None:
    shown = ("", "") if empty is None else (f"{empty:,.2f}", f"{router / empty:.2f}")
    table.add_row(what, f"{router:,.2f}", *shown, goal)


if __name__ == "__main__":
    main()
