"""python -m cluster.bench.worker_death: workers of a real cluster are killed and stopped in the middle of streams.

Prints how soon the router knows, how soon every stream has its next token at the client, and how soon the worker, or
the one in its place, serves again; and whether the goals are met. Only processes that this script started are touched.
The last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import tempfile
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cluster.client import AsyncClient, Chunk
from cluster.config import load_config
from cluster.up import detach, down
from protos.router_pb2 import WORKER_STATE_READY, GetStatusResponse, WorkerStatus

_POLL_S = 0.02
_HEAL_S = 60.0
_MIN_TOKENS = 5
_NUM_STREAMS = 2
_PROMPT = "Once upon a time there was a ferry that crossed the river every day, and "
# Long enough to be killed in the middle of.
_LONG_PROMPT = _PROMPT * 40


@dataclass(frozen=True, slots=True)
class Case:
    role: str
    how: signal.Signals
    count: int
    prompt: str = _PROMPT

    @property
    def name(self) -> str:
        return f"{self.how.name} {self.role}"


@dataclass(slots=True)
class Measured:
    """Seconds from each signal."""

    known: list[float] = field(default_factory=list)
    next_token: list[float] = field(default_factory=list)
    serves_again: list[float] = field(default_factory=list)


# From the signal to a decode worker: until the router knows (a stream breaks, or heartbeats stay away), and until every
# stream goes on at its client.
KNOWN_S = {"SIGKILL decode": 0.3, "SIGSTOP decode": 2.0}
NEXT_TOKEN_S = 3.0
CLUSTERS = {
    "1P1D": (
        "decode: {replicas: 1}",
        (
            Case("decode", signal.SIGKILL, 10),
            Case("decode", signal.SIGSTOP, 4),
            Case("prefill", signal.SIGKILL, 2, _LONG_PROMPT),
        ),
    ),
    "1P2D": ("decode: {replicas: 2}", (Case("decode", signal.SIGKILL, 10), Case("decode", signal.SIGSTOP, 4))),
}


class Streams:
    """Answers under way; when each last got a token."""

    def __init__(self, client: AsyncClient, prompt: str) -> None:
        self._answers = [
            client.stream(f"{uuid.uuid4()} {prompt}", max_tokens=1000, temperature=0.0, ignore_eos=True)
            for _ in range(_NUM_STREAMS)
        ]
        self.num_tokens = [0] * _NUM_STREAMS
        self.latest_s = [0.0] * _NUM_STREAMS
        self._readers = [asyncio.create_task(self._read(at, answer)) for at, answer in enumerate(self._answers)]

    async def _read(self, at: int, answer: AsyncGenerator[Chunk]) -> None:
        async with aclosing(answer):
            async for chunk in answer:
                self.num_tokens[at] += len(chunk.token_ids)
                self.latest_s[at] = time.monotonic()

    async def until_each_has(self, num_tokens: int) -> None:
        while min(self.num_tokens) < num_tokens:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)

    async def until_each_has_more_after(self, since_s: float) -> float:
        """When the last of them got its first token after that."""
        first: dict[int, float] = {}
        while len(first) < _NUM_STREAMS:
            for at, latest_s in enumerate(self.latest_s):
                if latest_s > since_s:
                    first.setdefault(at, latest_s)
            await asyncio.sleep(_POLL_S / 4)
        return max(first.values())

    async def close(self) -> None:
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)


@asynccontextmanager
async def streaming(client: AsyncClient, prompt: str) -> AsyncGenerator[Streams]:
    streams = Streams(client, prompt)
    try:
        yield streams
    finally:
        await streams.close()


async def measure(client: AsyncClient, case: Case) -> Measured:
    measured = Measured()
    for _ in range(case.count):
        await until(client, lambda status: all(w.state == WORKER_STATE_READY for w in status.workers))
        async with asyncio.timeout(_HEAL_S), streaming(client, case.prompt) as streams:
            if case.role == "decode":
                await streams.until_each_has(_MIN_TOKENS)
            await hurt(client, case, streams, measured)
    return measured


async def hurt(client: AsyncClient, case: Case, streams: Streams, measured: Measured) -> None:
    victim = await busiest(client, case.role)
    began_s = time.monotonic()
    os.kill(victim.stats.pid, case.how)
    try:
        await until(client, lambda status: worker_at(status, victim.address).state != WORKER_STATE_READY)
        known_s = time.monotonic()
        measured.known.append(known_s - began_s)
        if case.how is signal.SIGKILL:
            back = asyncio.create_task(until_back(client, victim))
        measured.next_token.append(await streams.until_each_has_more_after(known_s) - began_s)
    finally:
        if case.how is signal.SIGSTOP:
            began_s = time.monotonic()
            os.kill(victim.stats.pid, signal.SIGCONT)
            back = asyncio.create_task(until_back(client, victim))
    measured.serves_again.append(await back - began_s)


async def until_back(client: AsyncClient, victim: WorkerStatus) -> float:
    """When somebody serves there again."""
    await until(client, lambda status: worker_at(status, victim.address).state == WORKER_STATE_READY)
    return time.monotonic()


async def busiest(client: AsyncClient, role: str) -> WorkerStatus:
    """As soon as one has work."""
    while True:
        workers = [worker for worker in (await client.status()).workers if worker.stats.role == role]
        worker = max(workers, key=lambda worker: worker.stats.num_running)
        if worker.stats.num_running:
            return worker
        await asyncio.sleep(_POLL_S)


def worker_at(status: GetStatusResponse, address: str) -> WorkerStatus:
    return next(worker for worker in status.workers if worker.address == address)


async def until(client: AsyncClient, holds: Callable[[GetStatusResponse], bool]) -> None:
    async with asyncio.timeout(_HEAL_S):
        while not holds(await client.status()):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)


async def run(target: str, cases: Sequence[Case]) -> list[Measured]:
    async with AsyncClient(target) as client:
        return [await measure(client, case) for case in cases]


async def measure_all() -> dict[str, dict[str, Measured]]:
    """Of each cluster and each kind of death. All on one event loop: gRPC's poller outlives a loop, and complains of
    each that ends."""
    return {name: await measure_cluster(config, cases) for name, (config, cases) in CLUSTERS.items()}


async def measure_cluster(config: str, cases: Sequence[Case]) -> dict[str, Measured]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.yaml"
        path.write_text(f"name: bench-death\nrouter: {{http_port: 0, grpc_port: 0}}\n{config}\n", encoding="utf-8")
        cluster = load_config(path)
        state = await asyncio.to_thread(detach, cluster, str(path))
        try:
            results = await run(state.grpc_endpoint, cases)
        finally:
            await asyncio.to_thread(down, cluster.name)
    return {case.name: measured for case, measured in zip(cases, results, strict=True)}


def judge(results: Mapping[str, Mapping[str, Measured]]) -> dict[str, dict[str, float | bool]]:
    """Of every death of a decode worker, each goal with the seconds that it was held to."""
    goals: dict[str, dict[str, float | bool]] = {}
    for cluster, cases in results.items():
        for name in (name for name in KNOWN_S if name in cases):
            values = {
                f"{cluster}: {name} known, longest": (max(cases[name].known), KNOWN_S[name]),
                f"{cluster}: {name}, next token, p50": (statistics.median(cases[name].next_token), NEXT_TOKEN_S),
            }
            for what, (seconds, bound_s) in values.items():
                goals[what] = {"value": round(seconds, 4), "goal": bound_s, "met": seconds < bound_s}
    return goals


def table_of(results: Mapping[str, Mapping[str, Measured]]) -> Table:
    table = Table("cluster", "signal", "times", "router knows, s", "next token, s", "serves again, s")
    for cluster, cases in results.items():
        for name, measured in cases.items():
            columns = (measured.known, measured.next_token, measured.serves_again)
            table.add_row(cluster, name, str(len(measured.known)), *map(spread, columns))
    return table


def main() -> None:
    results = asyncio.run(measure_all())
    console = Console()
    console.print(table_of(results))
    goals = judge(results)
    for what, goal in goals.items():
        verdict = "met" if goal["met"] else "missed"
        console.print(f"{what:44} {goal['value']:6.3f} s  goal: under {goal['goal']} s: {verdict}")
    seconds = {cluster: {name: asdict(of) for name, of in cases.items()} for cluster, cases in results.items()}
    print(json.dumps({"seconds": seconds, "goals": goals}))


def spread(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f} (max {max(seconds):.2f})"


if __name__ == "__main__":
    main()
