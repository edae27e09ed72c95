"""Ten times more requests than can be served: nobody hangs, nobody is killed, and who is urgent is served soon."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from cluster.sim.loop import run, virtual_loop
from tests.factories import GREEDY, SimCluster, prompt_of, sim_cluster
from tests.fake_model import expected_tokens
from workers.errors import OverloadedError
from workers.request import NO_TERMS, Slo, Terms

JOB = Terms(priority=100)
# Three answers at a time.
SMALL = {"max_num_queued_reqs": 10, "queue_timeout_s": 5.0}


async def ask(cluster: SimCluster, name: str, terms: Terms = NO_TERMS, max_tokens: int = 20) -> float:
    """Seconds to the whole answer, which must be right."""
    began_s, params = virtual_loop().time(), replace(GREEDY, max_tokens=max_tokens)
    tokens = [
        token
        async for output in cluster.router.generate(prompt_of(60), params, name, terms=terms)
        for token in output.token_ids
    ]
    assert tokens == expected_tokens(prompt_of(60), params)
    return virtual_loop().time() - began_s


@pytest.mark.parametrize("seed", range(2))
def test_ten_times_too_many_end_all_typed_soon_and_leave_nothing(seed):
    async def main() -> None:
        async with sim_cluster(seed=seed, router=SMALL) as cluster:
            rng = virtual_loop().random
            tasks: list[asyncio.Task[float]] = []
            while virtual_loop().time() < 2.0:
                await asyncio.sleep(rng.expovariate(250.0))
                terms = rng.choice((NO_TERMS, JOB, Terms(tenant="other"), Terms(slo=Slo(ttft_ms=500))))
                tasks.append(asyncio.create_task(ask(cluster, f"r{len(tasks)}", terms)))
                if rng.random() < 0.05:
                    rng.choice(tasks).cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            # The last that wait have as long as the queue allows, and an answer's time.
            assert virtual_loop().time() < 2.0 + 5.0 + 1.0
            answered = [r for r in results if isinstance(r, float)]
            refused = [r for r in results if isinstance(r, OverloadedError)]
            left = [r for r in results if isinstance(r, asyncio.CancelledError)]
            assert len(answered) + len(refused) + len(left) == len(results)
            assert len(answered) > 25
            assert len(refused) > 6 * len(answered)

    run(main(), seed=seed)


def test_what_a_full_queue_cannot_take_is_refused_in_no_time():
    async def main() -> None:
        async with sim_cluster(router=SMALL) as cluster:
            waiting = [asyncio.create_task(ask(cluster, f"r{i}")) for i in range(30)]
            await asyncio.sleep(0)
            began_s = virtual_loop().time()
            with pytest.raises(OverloadedError) as caught:
                await ask(cluster, "late")
            assert caught.value.code == "queue_full"
            assert virtual_loop().time() == began_s
            await asyncio.gather(*waiting, return_exceptions=True)

    run(main())


def test_urgent_requests_wait_for_a_place_and_not_for_the_jobs_before_them():
    async def main() -> None:
        async with sim_cluster(router={"max_num_queued_reqs": 200}) as cluster:
            alone_s = await ask(cluster, "alone")
            jobs = [asyncio.create_task(ask(cluster, f"j{i}", JOB)) for i in range(100)]
            await asyncio.sleep(0.5)
            for i in range(20):
                # A job's answer must end first, for there is no preemption; then it goes before all the others.
                assert await ask(cluster, f"u{i}") < 5 * alone_s
            assert sum(not job.done() for job in jobs) > 30
            await asyncio.gather(*jobs)

    run(main())


def test_a_tenant_with_a_hundred_requests_does_not_hold_up_one_with_one():
    async def main() -> None:
        async with sim_cluster(router={"max_num_queued_reqs": 200}) as cluster:
            alone_s = await ask(cluster, "alone", Terms(tenant="quiet"))
            many = [asyncio.create_task(ask(cluster, f"m{i}", Terms(tenant="loud"))) for i in range(100)]
            await asyncio.sleep(0.2)
            assert await ask(cluster, "one", Terms(tenant="quiet")) < 5 * alone_s
            assert sum(not task.done() for task in many) > 80
            await asyncio.gather(*many)

    run(main())


def test_a_job_that_waits_for_a_worker_steps_back_for_who_is_urgent():
    async def main() -> None:
        # Room for one at a time.
        async with sim_cluster(num_gpu_blocks_override=25) as cluster:
            order: list[str] = []
            tasks = []
            for name, terms in (("first", JOB), ("job", JOB), ("urgent", NO_TERMS)):
                tasks.append(task := asyncio.create_task(ask(cluster, name, terms), name=name))
                task.add_done_callback(lambda task: order.append(task.get_name()))
                await asyncio.sleep(0.05)
            await asyncio.gather(*tasks)
            assert order == ["first", "urgent", "job"]

    run(main())
