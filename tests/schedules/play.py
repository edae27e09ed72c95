"""Play a schedule with a whole cluster on the virtual clock, and see that nobody gets a wrong token and no block is
lost, whatever happens."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from cluster.sim.loop import run, virtual_loop
from cluster.sim.network import Fault, corrupt, delay, drop, duplicate, truncate
from router.router import _RETRYABLE, Router
from tests.factories import sim_cluster
from tests.schedules.answer import Answer
from tests.schedules.schedule import ROUTER, Ask, Event, Kill, Pause, Schedule, Spoil
from tests.schedules.shared_frames import SharedFrames
from workers.errors import KVFerryError
from workers.request import Request

LEASE_S = 3.0
# Longer than the longest delay of a message and a call's deadline together, on top of a lease.
MARGIN_S = 8.0
# Nobody waits for longer than all retries take.
LONGEST_S = 300.0


@dataclass
class Outcome:
    """How many requests were answered whole, were left by their clients, and ended with an error."""

    num_answered: int = 0
    num_left: int = 0
    errors: list[str] = field(default_factory=list)
    # When all was over, on the virtual clock: two plays of one schedule agree on it.
    ended_s: float = 0.0

    @property
    def rate(self) -> float:
        """Of those who waited, how many were answered."""
        return self.num_answered / max(1, self.num_answered + len(self.errors))

    @classmethod
    def total(cls, outcomes: Iterable[Outcome]) -> Outcome:
        total = cls()
        for one in outcomes:
            total.num_answered += one.num_answered
            total.num_left += one.num_left
            total.errors += one.errors
        return total


def play(schedule: Schedule) -> Outcome:
    """Raises AssertionError, or whatever else came to light."""
    return run(_Play(schedule).main(), limit_s=2 * LONGEST_S)


class _Play:
    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.outcome = Outcome()
        self.num_attempts: Counter[str] = Counter()
        self.num_routers = 1
        # Whether a router is there.
        self.served = asyncio.Event()
        # Those who read from the router that is there.
        self.readers: dict[asyncio.Task[None], None] = {}
        self.shared_frames = SharedFrames()

    async def main(self) -> Outcome:
        schedule = self.schedule
        worker: dict[str, Any] = {
            "num_gpu_blocks_override": schedule.num_blocks,
            "enable_prefix_caching": schedule.prefix_caching,
            "transfer": {
                "lease_s": LEASE_S,
                "rpc_timeout_s": 3.0,
                "resume": "replicate" if schedule.replicates else "recompute",
                "transport": "shm" if schedule.pulls else "grpc",
            },
        }
        async with sim_cluster(
            schedule.prefill, schedule.decode, schedule.colocated,
            seed=schedule.seed, latency=heavy_tailed, idle_within_s=LEASE_S + MARGIN_S,
            router={"token_timeout_s": 10.0}, **worker,
        ) as self.cluster:  # fmt: skip
            self._count_attempts(self.cluster.router)
            self.served.set()
            await asyncio.gather(*(self._happen(number, event) for number, event in enumerate(schedule.events)))
            self.cluster.network.hooks.clear()
        self.outcome.ended_s = virtual_loop().time()
        return self.outcome

    async def _happen(self, number: int, event: Event) -> None:
        if isinstance(event, Spoil):
            self._spoil(event)
            return
        await asyncio.sleep(event.at_s)
        if isinstance(event, Ask):
            await self._ask(f"r{number}", event)
        elif event.name == ROUTER:
            assert isinstance(event, Kill)
            await self._kill_router(event)
        elif event.name in self.cluster.alive():
            await (self._kill(event) if isinstance(event, Kill) else self._pause(event))

    def _spoil(self, event: Spoil) -> None:
        method, fault = event.method, fault_of(event)
        if method == "Put" and self.schedule.pulls:
            method = "PutShared"
            if event.how == "flip":
                fault = self.shared_frames.flip(event.amount, bit_of(event))
        self.cluster.network.fault(method, fault, answers=event.answers, skip=event.nth, count=1)

    async def _kill(self, event: Kill) -> None:
        await self.cluster.kill(event.name)
        if event.back_after_s is not None:
            await asyncio.sleep(event.back_after_s)
            await self.cluster.replace(event.name)

    async def _pause(self, event: Pause) -> None:
        host = self.cluster.hosts[event.name]
        host.pause()
        await asyncio.sleep(event.for_s)
        host.resume()

    async def _kill_router(self, event: Kill) -> None:
        """Its clients are cut off; what it asked for is aborted by lease."""
        cluster = self.cluster
        self.served.clear()
        cluster.router_host.kill()
        for reader in list(self.readers):
            reader.cancel()
        await asyncio.gather(*self.readers, return_exceptions=True)
        await cluster.router.stop()
        await cluster.pool.stop()
        await asyncio.sleep(event.back_after_s or 0.0)
        self.num_routers += 1
        await cluster.launch_router(f"router-{self.num_routers}")
        self._count_attempts(cluster.router)
        self.served.set()

    async def _ask(self, request_id: str, ask: Ask) -> None:
        answer = Answer(ask)
        patience_s = LONGEST_S if ask.patience_s is None else ask.patience_s
        try:
            async with asyncio.timeout(patience_s):
                while await self._is_cut_off(request_id, answer):
                    answer = Answer(ask)
        except TimeoutError:
            assert ask.patience_s is not None, f"{request_id} did not end"
            answer.require_a_beginning()
            self.outcome.num_left += 1
        except KVFerryError as error:
            answer.require_a_beginning()
            self._require_all_tries_spent(request_id, error)
            self.outcome.errors.append(f"{request_id}: {type(error).__name__}: {error.message}")
        else:
            answer.require_whole()
            self.outcome.num_answered += 1

    async def _is_cut_off(self, request_id: str, answer: Answer) -> bool:
        """Read the answer from the router that is there; whether this one died in between."""
        await self.served.wait()
        self.num_attempts[request_id] = 0
        reading = asyncio.create_task(answer.read(self.cluster.router, request_id))
        self.readers[reading] = None
        try:
            await asyncio.wait((reading,))
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            del self.readers[reading]
        if reading.cancelled():
            return True
        reading.result()
        return False

    def _count_attempts(self, router: Router) -> None:
        numbered = router._numbered

        def counted(request: Request) -> Request:
            self.num_attempts[request.request_id] += 1
            return numbered(request)

        router._numbered = counted  # type: ignore[method-assign]

    def _require_all_tries_spent(self, request_id: str, error: KVFerryError) -> None:
        assert isinstance(error, _RETRYABLE), f"{request_id}: {error!r} is not what another try could mend"
        spent, most = self.num_attempts[request_id], self.cluster.router._config.max_attempts
        assert spent >= most, f"{request_id} ended after {spent} of {most} tries: {error!r}"


def fault_of(spoil: Spoil) -> Fault:
    match spoil.how:
        case "lose":
            return drop
        case "repeat":
            return duplicate
        case "delay":
            return delay(spoil.amount)
        case "truncate":
            return lambda data: truncate(int(spoil.amount * len(data)))(data)
        case "flip":
            return lambda data: corrupt(int(spoil.amount * len(data)), bit_of(spoil))(data)


def bit_of(spoil: Spoil) -> int:
    return 1 << int(spoil.amount * 1024) % 8


def heavy_tailed(rng: random.Random, num_bytes: int) -> float:
    """Mostly a fast network; now and then a message takes far longer than a retry's wait."""
    return rng.uniform(1e-4, 1e-3) if rng.random() < 0.97 else rng.expovariate(1 / 0.3)
