"""Jobs beside requests that somebody waits for: no load stops them, and what holds them back holds back nobody else."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import pytest

from cluster.sim.loop import run, virtual_loop
from router.queue import _JOBS_SHARE, RequestQueue
from tests.factories import SimCluster, make_request, sim_cluster
from tests.router.test_job_terms import JOB, step_s
from tests.router.test_prediction import BIG, ask
from tests.router.test_queue import Crowd, arrive, crowd
from workers.errors import OverloadedError
from workers.request import Slo, Terms

# 15 answers at once are as many as this allows.
ROUTER = {"slo": {"tpot_ms": 20}}
# What somebody waits for does not mind.
PATIENT = Terms(slo=Slo(tpot_ms=1e9))


@asynccontextmanager
async def constant_load(cluster: SimCluster, num_running: int = 20) -> AsyncIterator[None]:
    """So many answers at any time."""
    numbers = itertools.count()

    async def ask_on() -> None:
        while True:
            await ask(cluster, 10, f"load {next(numbers)}", PATIENT, max_tokens=40)

    tasks = [asyncio.create_task(ask_on()) for _ in range(num_running)]
    # So that the pace is known.
    await asyncio.sleep(5)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def test_a_job_goes_on_under_a_load_that_never_leaves_it_room_within_the_slo():
    async def main() -> None:
        async with sim_cluster(step_s=step_s, router=ROUTER, **BIG) as cluster, constant_load(cluster):
            async with asyncio.timeout(20):
                await asyncio.gather(*(ask(cluster, 10, f"j{at}", JOB, max_tokens=20) for at in range(5)))

    run(main())


def test_the_load_hardly_notices_the_job_that_goes_on():
    async def main() -> None:
        async with sim_cluster(step_s=step_s, router=ROUTER, **BIG) as cluster, constant_load(cluster):
            before = (await ask(cluster, 10, "before", PATIENT, max_tokens=20)).tpot_s
            jobs = [asyncio.create_task(ask(cluster, 10, f"j{at}", JOB, max_tokens=20)) for at in range(9)]
            await asyncio.sleep(1)
            (decode,) = (worker for worker in cluster.router._pool.workers if worker.role == "decode")
            assert decode.num_jobs == 1
            assert (await ask(cluster, 10, "beside", PATIENT, max_tokens=20)).tpot_s < 1.15 * before
            await asyncio.gather(*jobs)

    run(main())


@pytest.mark.parametrize("priority", [0, 100, 200])
def test_a_job_that_is_held_back_keeps_no_request_waiting(priority):
    async def main() -> None:
        async with sim_cluster(step_s=step_s, router=ROUTER, **BIG) as cluster, constant_load(cluster):
            terms = Terms(slo=PATIENT.slo, priority=priority)
            alone_s = (await ask(cluster, 10, "alone", terms)).ttft_s
            jobs = [asyncio.create_task(ask(cluster, 10, f"j{at}", JOB, max_tokens=200)) for at in range(3)]
            await asyncio.sleep(1)
            assert not any(job.done() for job in jobs)
            for at in range(5):
                assert (await ask(cluster, 10, f"r{at}", terms)).ttft_s < alone_s + 0.1
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)

    run(main())


def test_of_so_many_that_leave_a_queue_that_never_empties_one_is_a_jobs():
    async def main() -> list[str]:
        people = crowd()
        tasks = [asyncio.create_task(people.come(f"j{at}", priority=100, job=True)) for at in range(2)]
        tasks += await arrive(people, *((f"r{at}", "", 0, 10) for at in range(3 * _JOBS_SHARE)))
        people.let_in()
        await asyncio.gather(*tasks)
        return people.served

    served = run(main())
    assert [served.index(f"j{at}") for at in range(2)] == [_JOBS_SHARE - 1, 2 * _JOBS_SHARE - 1]


@dataclass
class Narrow(Crowd):
    """No job finds room."""

    held_back: bool = False

    async def come(
        self, name: str, tenant: str = "", priority: int = 0, num_tokens: int = 10, *, job: bool = False
    ) -> None:
        request = make_request([1] * num_tokens, request_id=name, tenant=tenant, priority=priority, job=job)
        with self.queue.joined(request) as waiter:
            while True:
                async with self.queue.turn(waiter):
                    await asyncio.sleep(0.001)
                    if not job:
                        self.queue.served(waiter)
                        self.served.append(name)
                        return
                    self.queue.refused(waiter)
                    if self.held_back and self.queue.hold_back_jobs():
                        continue
                    self.changed.clear()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(0.01):
                            await self.changed.wait()


@pytest.mark.parametrize("held_back", [False, True])
def test_a_job_that_finds_no_room_when_its_turn_has_come_lets_requests_pass(held_back):
    async def main() -> int:
        changed = asyncio.Event()
        people = Narrow(RequestQueue(1000, changed), changed=changed, held_back=held_back)
        job = asyncio.create_task(people.come("job", job=True))
        await asyncio.sleep(0.1)
        async with asyncio.timeout(20):
            for at in range(5 * _JOBS_SHARE):
                await people.come(f"r{at}")
        job.cancel()
        await asyncio.gather(job, return_exceptions=True)
        return len(people.served)

    assert run(main()) == 5 * _JOBS_SHARE


def test_jobs_take_no_place_in_the_queue_from_requests_and_lose_none_to_them():
    async def main() -> None:
        people = crowd(2)
        jobs = [asyncio.create_task(people.come(f"j{at}", priority=100, job=True)) for at in range(5)]
        waiting = await arrive(people, ("a", "", 0, 10), ("b", "", 0, 10))
        with pytest.raises(OverloadedError, match="2 requests wait"):
            await people.come("late")
        assert len(people.queue) == 7
        began_s = virtual_loop().time()
        people.let_in()
        await asyncio.gather(*jobs, *waiting)
        assert virtual_loop().time() - began_s < 0.01

    run(main())
