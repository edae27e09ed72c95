"""Real processes under load, killed and stopped at random: nothing is lost, nothing is wrong, nothing leaks."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cluster.client import AsyncClient, Sampling
from protos.router_pb2 import WORKER_STATE_READY
from tests.conftest import SUMMARIES
from tests.e2e.clusters import RealCluster, Running, up, wait_until
from tests.exact import Comparator
from tests.prompts import chat, questions, token_ids
from workers.errors import KVFerryError
from workers.request import SamplingParams

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

# By each transport. auto: shm, all being on one host.
NUM_REQUESTS = {"auto": 200, "grpc": 120}
IN_FLIGHT = 8
LEASE_S = 3.0
HEAL_S = 90.0
# How much larger a process may be after the deaths of others: what allocators keep.
GROWTH, GROWTH_BYTES = 1.1, 32 << 20
# At the end, to processes of any age: first so many that every block of a pool has been written to, then so many again
# that a leak shows. Each hands over some 3 MiB of KV, so a worker that kept it would grow by 90 MiB; what allocators
# keep makes 10 of difference.
NUM_SETTLING = 60
LEAK_BYTES = 32 << 20
CONFIG = f"""
router: {{http_port: 0, grpc_port: 0}}
prefill: {{replicas: 2}}
decode: {{replicas: 2}}
max_model_len: 1024
kv_cache_memory_bytes: 100663296
transfer: {{lease_s: {LEASE_S}, transport: %s}}
"""


@dataclass
class Outcome:
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    error: KVFerryError | None = None


def requests_of(seed: int, count: int, prefix: str = "") -> list[tuple[str, Sampling]]:
    """Greedy and seeded ones, some with several choices. With a prefix, no two begin alike, nor as others do."""
    rng = random.Random(seed)
    asked = questions(40)
    found = []
    for number in range(count):
        sampling = Sampling(max_tokens=rng.randint(1, 48), temperature=rng.choice((0.0, 0.8)), seed=number)
        question = f"{prefix} {number}: " * bool(prefix) + asked[number % len(asked)]
        found.append((question, sampling | {"n": rng.choice((1, 1, 1, 2))}))
    return found


async def ask_all(target: str, requests: Sequence[tuple[str, Sampling]]) -> list[Outcome]:
    gate = asyncio.Semaphore(IN_FLIGHT)

    async def one(client: AsyncClient, question: str, sampling: Sampling) -> Outcome:
        outcome = Outcome()
        async with gate:
            try:
                async for chunk in client.stream(chat(question), timeout_s=300, **sampling):
                    tokens = outcome.token_ids.setdefault(chunk.choice, [])
                    assert chunk.index == len(tokens), "a token is missing, or came twice"
                    tokens.extend(chunk.token_ids)
            except KVFerryError as error:
                outcome.error = error
        return outcome

    async with AsyncClient(target) as client:
        return await asyncio.gather(*(one(client, *request) for request in requests))


class Monkey:
    """Kills a random worker every few seconds; now and then it stops one for longer than a lease instead."""

    def __init__(self, running: Running, seed: int) -> None:
        self._running = running
        self._rng = random.Random(seed)
        self.did: Counter[str] = Counter()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._rng.uniform(2, 5))
            pids = await asyncio.to_thread(ready_pids, self._running)
            if not pids:
                continue
            pid = self._rng.choice(pids)
            with suppress(ProcessLookupError):
                if self._rng.random() < 0.3:
                    await self._stop(pid)
                else:
                    os.kill(pid, signal.SIGKILL)
                    self.did["killed"] += 1

    async def _stop(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(LEASE_S + self._rng.uniform(1, 3))
        finally:
            os.kill(pid, signal.SIGCONT)
        self.did["stopped"] += 1


def ready_pids(running: Running) -> list[int]:
    return [w.stats.pid for w in running.status().workers if w.state == WORKER_STATE_READY]


def own_bytes(pid: int) -> int:
    """Memory that is nobody else's: what workers share of their pools comes and goes with who reads it."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) << 10


def memory_of(running: Running) -> dict[str, int]:
    """Bytes of the router, and of each worker that serves, by its role and pid."""
    status = running.status()
    pids = {f"{w.stats.role} {w.stats.pid}": w.stats.pid for w in status.workers if w.state == WORKER_STATE_READY}
    pids["router"] = status.routers[0].pid
    return {name: own_bytes(pid) for name, pid in pids.items()}


def require_no_leak(running: Running, config: pytest.Config) -> None:
    """Of processes that are warm, however long they have been there, requests that end leave nothing."""
    asyncio.run(ask_all(running.grpc, requests_of(3, NUM_SETTLING, "settling")))
    before = memory_of(running)
    asyncio.run(ask_all(running.grpc, requests_of(3, NUM_SETTLING, "again")))
    after = memory_of(running)
    assert before.keys() == after.keys()
    grown = {name: after[name] - num_bytes for name, num_bytes in before.items()}
    told = ", ".join(f"{name} {num_bytes / (1 << 20):+.1f}" for name, num_bytes in grown.items())
    config.stash[SUMMARIES].append(f"chaos: MiB more after {NUM_SETTLING} requests: {told}")
    assert max(grown.values()) < LEAK_BYTES


def require_a_tie(
    comparator: Comparator,
    question: str,
    sampling: Sampling,
    mine: dict[int, list[int]],
    others: dict[int, list[int]],
) -> None:
    """Other batches round in another way: where two answers part, two tokens must have been as likely."""
    params = SamplingParams(**{key: value for key, value in sampling.items() if key != "n"})  # type: ignore[arg-type]
    assert mine.keys() == others.keys()
    for choice, tokens in mine.items():
        comparator.require_same(token_ids(question), params, tokens, others[choice], choice=choice)


@pytest.mark.parametrize("transport", NUM_REQUESTS)
def test_requests_survive_kills_and_stops(transport, tmp_path, pytestconfig, comparator: Comparator):
    requests = requests_of(1, NUM_REQUESTS[transport])
    with up(RealCluster(f"e2e-chaos-{transport}", tmp_path), CONFIG % transport) as running:
        began_s = time.monotonic()
        calm = asyncio.run(ask_all(running.grpc, requests))
        calm_s = time.monotonic() - began_s
        assert not [outcome.error for outcome in calm if outcome.error]
        router_pid = running.status().routers[0].pid
        before = memory_of(running)
        monkey = Monkey(running, seed=3)

        async def chaos() -> list[Outcome]:
            at_work = asyncio.create_task(monkey.run())
            try:
                return await ask_all(running.grpc, requests)
            finally:
                at_work.cancel()
                await asyncio.gather(at_work, return_exceptions=True)

        began_s = time.monotonic()
        outcomes = asyncio.run(chaos())
        chaos_s = time.monotonic() - began_s
        exact = [mine.token_ids == his.token_ids for mine, his in zip(outcomes, calm, strict=True)]
        errors = [outcome.error for outcome in outcomes if outcome.error]
        pytestconfig.stash[SUMMARIES].append(
            f"chaos by {transport}: {monkey.did['killed']} kills and {monkey.did['stopped']} stops in {chaos_s:.0f} s "
            f"(calm: {calm_s:.0f} s): {sum(exact)} of {len(exact)} exact, {len(errors)} errors"
        )
        assert monkey.did["killed"] >= len(requests) // 40
        assert monkey.did["stopped"] >= 1
        assert len(errors) <= 0.01 * len(outcomes), errors
        for (question, sampling), mine, his in zip(requests, outcomes, calm, strict=True):
            if mine.token_ids != his.token_ids and not mine.error:
                require_a_tie(comparator, question, sampling, mine.token_ids, his.token_ids)
        wait_until(lambda: len(ready_pids(running)), lambda count: count == 4, HEAL_S)
        verified = running.cluster.kvferry("verify", "--name", running.cluster.name)
        assert verified.returncode == 0, verified.stdout + verified.stderr
        assert "clean" in verified.stdout
        assert running.status().routers[0].pid == router_pid
        after = memory_of(running)
        survivors = {name: num_bytes for name, num_bytes in before.items() if name in after}
        assert {name for name in survivors if after[name] > GROWTH * before[name] + GROWTH_BYTES} == set()
        require_no_leak(running, pytestconfig)
