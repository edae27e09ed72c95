"""Who goes next, and who is told to come back later."""

from __future__ import annotations

import asyncio

import pytest

from cluster.sim.loop import run, virtual_loop
from cluster.sim.network import delay, drop
from router.admission import Admission
from tests.factories import SimCluster, make_request, prompt_of, sim_cluster
from tests.fake_model import expected_tokens
from workers.errors import KVFerryError, OverloadedError, UnavailableError
from workers.request import SamplingParams

LONG = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def ask(cluster: SimCluster, num_tokens: int, request_id: str) -> asyncio.Task[list[int]]:
    return asyncio.create_task(cluster.ask(prompt_of(num_tokens), LONG, request_id), name=request_id)


def test_more_than_may_wait_are_refused_at_once_and_the_others_are_served():
    async def main() -> None:
        async with sim_cluster(router={"max_num_queued_reqs": 3}) as cluster:
            tasks = [ask(cluster, 100, f"r{i}") for i in range(8)]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            assert virtual_loop().time() < 0.1
            results = await asyncio.gather(*tasks, return_exceptions=True)
            refused = [r for r in results if isinstance(r, OverloadedError)]
            assert 1 <= len(refused) <= 5
            assert all("max_num_queued_reqs" in error.message for error in refused)
            assert [r for r in results if not isinstance(r, OverloadedError)] == [
                expected_tokens(prompt_of(100), LONG)
            ] * (8 - len(refused))

    run(main())


def test_a_request_for_which_there_is_no_room_waits_and_then_succeeds():
    async def main() -> None:
        async with sim_cluster() as cluster:
            first = [ask(cluster, 100, f"r{i}") for i in range(2)]
            await asyncio.sleep(0.1)
            assert cluster.workers["d0"].engine.block_manager.num_free < 26
            third = ask(cluster, 100, "third")
            await asyncio.sleep(0.05)
            assert cluster.router.num_queued == 1
            assert await third == expected_tokens(prompt_of(100), LONG)
            await asyncio.gather(*first)

    run(main())


def test_requests_go_in_the_order_in_which_they_came():
    async def main() -> None:
        async with sim_cluster() as cluster:
            order: list[str] = []
            tasks = [ask(cluster, 60, f"r{i}") for i in range(6)]
            for task in tasks:
                task.add_done_callback(lambda task: order.append(task.get_name()))
            await asyncio.gather(*tasks)
            assert order == [f"r{i}" for i in range(6)]

    run(main())


def test_no_more_than_two_steps_worth_of_prompt_waits_in_a_prefill_worker():
    async def main() -> None:
        async with sim_cluster(num_gpu_blocks_override=1000, max_num_seqs=16) as cluster:
            tasks = [ask(cluster, 10, f"r{i}") for i in range(12)]
            (handle,) = (w for w in cluster.pool.workers if w.role == "prefill")
            most = 0
            while not all(task.done() for task in tasks):
                most = max(most, handle.num_queued_tokens)
                await asyncio.sleep(0.0005)
            # The last may begin below two steps' worth (32) and end above.
            assert 32 <= most < 32 + 10

    run(main())


def test_two_prefill_workers_share_the_prompts_and_two_decode_workers_the_answers():
    async def main() -> None:
        async with sim_cluster(2, 2) as cluster:
            await asyncio.gather(*(ask(cluster, 30, f"r{i}") for i in range(8)))
            for name in ("p0", "p1"):
                assert cluster.workers[name].engine.num_prompt_tokens_computed == 4 * 30
            for name in ("d0", "d1"):
                assert cluster.workers[name].engine.num_output_tokens == 4 * 39

    run(main())


def test_a_wait_that_is_too_long_is_an_error_and_leaves_nothing_behind():
    async def main() -> None:
        async with sim_cluster(router={"queue_timeout_s": 0.1}) as cluster:
            tasks = [ask(cluster, 100, f"r{i}") for i in range(6)]
            results = await asyncio.gather(*tasks, return_exceptions=True)
            late = [r for r in results if isinstance(r, OverloadedError)]
            assert late
            assert all("queue_timeout_s" in error.message for error in late)

    run(main())


@pytest.mark.parametrize("after_s", [0.0, 0.0002, 0.0004, 0.0006, 0.002])
def test_leaving_the_queue_while_a_grant_is_on_its_way_gives_it_back(after_s):
    async def main() -> None:
        async with sim_cluster() as cluster:
            admission = Admission(cluster.pool, cluster.router._config)
            placing = asyncio.create_task(admission.place(make_request(10, router_id="router-1")))
            await asyncio.sleep(after_s)
            if placing.done():
                admission.leave(placing.result())
                await placing.result().decode.abort("r")
            placing.cancel()
            await asyncio.gather(placing, return_exceptions=True)
            await asyncio.sleep(0.1)

    run(main())


@pytest.mark.parametrize("answers", [False, True])
def test_a_reservation_that_gets_no_answer_is_tried_again_and_leaves_nothing_behind(answers):
    async def main() -> None:
        async with sim_cluster(router={"rpc_timeout_s": 1.0}, idle_within_s=2.0) as cluster:
            cluster.network.fault("Reserve", drop, answers=answers, count=1)
            assert await cluster.ask(prompt_of(10)) == expected_tokens(prompt_of(10), LONG)[:8]

    run(main())


def test_a_decode_worker_that_is_slow_to_answer_holds_up_nobody_for_longer_than_its_deadline():
    async def main() -> None:
        async with sim_cluster(router={"rpc_timeout_s": 1.0}, idle_within_s=6.0) as cluster:
            cluster.network.fault("Reserve", delay(5.0), count=1)
            await asyncio.gather(ask(cluster, 10, "slow"), ask(cluster, 10, "next"))
            assert virtual_loop().time() < 3.0

    run(main())


def test_without_workers_a_request_fails_with_the_missing_role_named():
    async def main() -> None:
        async with sim_cluster(prefill=0, decode=0) as cluster:
            with pytest.raises(UnavailableError, match="no prefill and no decode worker answers"):
                await cluster.ask(prompt_of(4))
        async with sim_cluster(prefill=0, decode=1) as cluster:
            with pytest.raises(UnavailableError, match="no prefill worker answers"):
                await cluster.ask(prompt_of(4))

    run(main())


def test_errors_of_admission_are_typed():
    async def main() -> None:
        async with sim_cluster() as cluster:
            with pytest.raises(KVFerryError, match="from 1 to 159"):
                await cluster.ask(prompt_of(200))

    run(main())
