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

NUM_REQUESTS = 200
IN_FLIGHT = 8
LEASE_S = 3.0
HEAL_S = 90.0
# How much larger a process may be than one of its kind was after as many requests without any death: what allocators
# keep differs by a few percent from one process to the next.
GROWTH, GROWTH_BYTES = 1.1, 32 << 20
CONFIG = f"""
router: {{http_port: 0, grpc_port: 0}}
prefill: {{replicas: 2}}
decode: {{replicas: 2}}
max_model_len: 2048
kv_cache_memory_bytes: 268435456
transfer: {{lease_s: {LEASE_S}, transport: auto}}
"""


@dataclass
class Outcome:
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    error: KVFerryError | None = None


def requests_of(seed: int) -> list[tuple[str, Sampling]]:
    """Greedy and seeded ones, some with several choices."""
    rng = random.Random(seed)
    asked = questions(40)
    found = []
    for number in range(NUM_REQUESTS):
        sampling = Sampling(max_tokens=rng.randint(1, 48), temperature=rng.choice((0.0, 0.8)), seed=number)
        found.append((asked[number % len(asked)], sampling | {"n": rng.choice((1, 1, 1, 2))}))
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


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def largest_by_role(running: Running) -> dict[str, int]:
    """Bytes of the largest process of each role that serves; of the router under its own name."""
    status = running.status()
    found = {"router": resident_bytes(status.routers[0].pid)}
    for worker in status.workers:
        if worker.state == WORKER_STATE_READY:
            role = worker.stats.role
            found[role] = max(found.get(role, 0), resident_bytes(worker.stats.pid))
    return found


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


def test_two_hundred_requests_survive_kills_and_stops(tmp_path, pytestconfig, comparator: Comparator):
    requests = requests_of(seed=1)
    with up(RealCluster("e2e-chaos", tmp_path), CONFIG) as running:
        began_s = time.monotonic()
        calm = asyncio.run(ask_all(running.grpc, requests))
        calm_s = time.monotonic() - began_s
        assert not [outcome.error for outcome in calm if outcome.error]
        router_pid = running.status().routers[0].pid
        # Warm by now: every block of their pools has been written to.
        before = largest_by_role(running)
        monkey = Monkey(running, seed=2)

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
            f"chaos: {monkey.did['killed']} kills and {monkey.did['stopped']} stops in {chaos_s:.0f} s "
            f"(calm: {calm_s:.0f} s): {sum(exact)} of {len(exact)} exact, {len(errors)} errors"
        )
        assert monkey.did["killed"] >= 5
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
        after = largest_by_role(running)
        for name, num_bytes in before.items():
            pytestconfig.stash[SUMMARIES].append(
                f"chaos: {name} {num_bytes >> 20} MiB before, {after[name] >> 20} MiB after"
            )
        assert {name for name in before if after[name] > GROWTH * before[name] + GROWTH_BYTES} == set()
