"""Workers join, drain, change their role and leave while requests are under way: each answer stays what it was."""

from __future__ import annotations

import asyncio

from cluster.sim.loop import run
from router.roles import Member
from tests.factories import SimCluster, prompt_of, sim_cluster
from tests.fake_model import expected_tokens
from workers.config import Role
from workers.request import SamplingParams

PARAMS = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


def members(cluster: SimCluster, **draining: bool) -> dict[str, Member]:
    """All that are there, as what they are."""
    return {
        worker.address: Member(worker.config.role, draining.get(name, False))
        for name, worker in cluster.workers.items()
        if name not in cluster.dead
    }


async def join(cluster: SimCluster, name: str, role: Role) -> None:
    cluster._roles[name] = role
    await cluster.launch(name)
    await cluster.pool.set_workers(members(cluster))


def test_a_worker_that_joins_gets_requests():
    async def main() -> None:
        async with sim_cluster(1, 1) as cluster:
            await join(cluster, "d1", "decode")
            asked = [asyncio.create_task(cluster.ask(prompt_of(8, seed=i), PARAMS, f"r{i}")) for i in range(6)]
            for i, answer in enumerate(asked):
                assert await answer == expected_tokens(prompt_of(8, seed=i), PARAMS)
            assert cluster.workers["d1"].engine.num_output_tokens > 0

    run(main())


def test_a_draining_worker_ends_what_it_has_and_gets_nothing_new():
    async def main() -> None:
        async with sim_cluster(1, 2) as cluster:
            before = [asyncio.create_task(cluster.ask(prompt_of(8, seed=i), PARAMS, f"b{i}")) for i in range(4)]
            await asyncio.sleep(0.15)
            victim = next(name for name in ("d0", "d1") if cluster.workers[name].num_requests)
            await cluster.pool.set_workers(members(cluster, **{victim: True}))
            worker = cluster.workers[victim]
            at_work = set(worker.engine.requests)
            assert at_work
            after = [asyncio.create_task(cluster.ask(prompt_of(8, seed=i), PARAMS, f"a{i}")) for i in range(4)]
            while not all(task.done() for task in (*before, *after)):
                assert set(worker.engine.requests) <= at_work
                await asyncio.sleep(0.01)
            assert worker.num_requests == 0
            for i, answer in enumerate(before + after):
                assert answer.result() == expected_tokens(prompt_of(8, seed=i % 4), PARAMS)
            shown = {status.stats.name: status.draining for status in cluster.pool.status()}
            assert [name for name, draining in shown.items() if draining] == [victim]

    run(main())


def test_what_a_worker_has_when_it_leaves_goes_on_at_others():
    async def main() -> None:
        async with sim_cluster(1, 2) as cluster:
            asked = [asyncio.create_task(cluster.ask(prompt_of(8, seed=i), PARAMS, f"r{i}")) for i in range(4)]
            await asyncio.sleep(0.15)
            victim = next(name for name in ("d0", "d1") if cluster.workers[name].num_requests)
            left = members(cluster)
            del left[cluster.workers[victim].address]
            await cluster.pool.set_workers(left)
            assert [worker.address for worker in cluster.pool.workers] == list(left)
            for i, answer in enumerate(asked):
                assert await answer == expected_tokens(prompt_of(8, seed=i), PARAMS)

    run(main())


def test_requests_wait_for_the_only_worker_of_a_role_that_drains():
    """It is about to be started anew, however long that takes."""

    async def main() -> None:
        async with sim_cluster(1, 1) as cluster:
            await cluster.pool.set_workers(members(cluster, p0=True))
            asked = asyncio.create_task(cluster.ask(prompt_of(8), PARAMS))
            await asyncio.sleep(40.0)
            assert not asked.done()
            await cluster.pool.set_workers(members(cluster))
            assert await asked == expected_tokens(prompt_of(8), PARAMS)

    run(main())


def test_a_worker_that_changes_its_role_keeps_its_requests_and_serves_in_the_new_one():
    async def main() -> None:
        async with sim_cluster(1, 2) as cluster:
            before = [asyncio.create_task(cluster.ask(prompt_of(8, seed=i), PARAMS, f"b{i}")) for i in range(4)]
            await asyncio.sleep(0.15)
            worker = cluster.workers["d1"]
            incarnation = worker.incarnation
            worker.set_role("prefill")
            await cluster.pool.set_workers(members(cluster))
            for i, answer in enumerate(before):
                assert await answer == expected_tokens(prompt_of(8, seed=i), PARAMS)
            await asyncio.sleep(1.0)
            computed = worker.engine.num_prompt_tokens_computed
            after = [asyncio.create_task(cluster.ask(prompt_of(8, seed=9 + i), PARAMS, f"a{i}")) for i in range(4)]
            for i, answer in enumerate(after):
                assert await answer == expected_tokens(prompt_of(8, seed=9 + i), PARAMS)
            assert worker.engine.num_prompt_tokens_computed > computed
            assert worker.incarnation == incarnation
            assert not any(status.refused for status in cluster.pool.status())

    run(main())
