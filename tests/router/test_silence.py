"""Workers that stop in the middle of something, as by SIGSTOP, and wake up or not; and those being replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest

from cluster.sim.loop import run, virtual_loop
from cluster.sim.network import delay, drop
from tests.factories import GREEDY, SimCluster, prompt_of, sim_cluster
from tests.fake_model import expected_tokens
from tests.router.simulated import ask, tokens_until
from tests.router.test_pool import handle_of
from tests.router.test_stalls import until
from workers.errors import UnavailableError

LONG = replace(GREEDY, max_tokens=60)
# Four heartbeats, and what messages take, would be too late.
KNOWN_WITHIN_S = 1.8
_METHODS = ("GetStats", "StreamOutputs", "Abort", "Reserve", "Prefill", "Submit", "Put", "Commit", "Release", "Renew")


@contextmanager
def silent(cluster: SimCluster, name: str) -> Iterator[None]:
    """Nothing gets in or out, and no connection breaks."""
    address = cluster.workers[name].address
    faults = [
        cluster.network.fault(method, drop, answers=answers, to=address)
        for method in _METHODS
        for answers in (True, False)
    ]
    yield
    for fault in faults:
        fault.remove()


@pytest.mark.parametrize("phase", range(10))
def test_a_silent_worker_is_known_to_be_gone_in_time_wherever_its_heartbeat_was(phase):
    async def main() -> None:
        async with sim_cluster(1, 2) as cluster:
            handle = handle_of(cluster, "d0")
            await asyncio.sleep(2.0 + 0.05 * phase)
            with silent(cluster, "d0"):
                await asyncio.sleep(1.2)
                assert handle.reachable
                await asyncio.sleep(KNOWN_WITHIN_S - 1.2)
                assert not handle.reachable
            await asyncio.sleep(2.0)
            assert handle.reachable

    run(main())


@pytest.mark.parametrize("after_steps", [0, 1, 3])
def test_a_prompt_whose_prefill_worker_falls_silent_is_taken_by_another_as_soon_as_that_is_known(after_steps):
    async def main() -> None:
        # What the silent one still holds of decode's, its lease ends.
        async with sim_cluster(2, 1, idle_within_s=12.0) as cluster:
            asking = ask(cluster, 90)
            prefill = [cluster.workers[name].engine for name in ("p0", "p1")]
            await until(lambda: any(one.requests and one.num_steps >= after_steps for one in prefill))
            victim = next(name for name in ("p0", "p1") if cluster.workers[name].engine.requests)
            began_s = virtual_loop().time()
            with silent(cluster, victim):
                assert await asking == expected_tokens(prompt_of(90), LONG)
                assert virtual_loop().time() - began_s < KNOWN_WITHIN_S + 1.0

    run(main())


def test_a_prompt_waits_for_the_only_prefill_worker_to_wake_up():
    async def main() -> None:
        async with sim_cluster(idle_within_s=12.0) as cluster:
            asking = ask(cluster, 90)
            await until(lambda: cluster.workers["p0"].engine.num_steps > 1)
            with silent(cluster, "p0"):
                await asyncio.sleep(8.0)
            assert await asking == expected_tokens(prompt_of(90), LONG)

    run(main())


def test_a_worker_that_wakes_up_is_told_what_it_was_not_told_asleep():
    async def main() -> None:
        async with sim_cluster(step_s=lambda batch: 0.1, idle_within_s=12.0) as cluster:
            slow = replace(GREEDY, max_tokens=130)
            asking = ask(cluster, 20, slow)
            await tokens_until(cluster, 5)
            decode = cluster.workers["d0"]
            with silent(cluster, "d0"):
                await until(lambda: not handle_of(cluster, "d0").reachable)
                await asyncio.sleep(4.0)
                assert decode.engine.requests
            await asyncio.sleep(2.0)
            assert not decode.engine.requests
            assert decode.engine.num_output_tokens < 120
            assert await asking == expected_tokens(prompt_of(20), slow)

    run(main())


def test_nothing_is_placed_on_a_new_process_before_it_has_told_who_it_is():
    async def main() -> None:
        async with sim_cluster(router={"max_attempts": 1}) as cluster:
            await asyncio.sleep(0.3)
            await cluster.kill("d0")
            await cluster.replace("d0")
            cluster.network.fault("GetStats", delay(0.4), to=cluster.workers["d0"].address, count=2)
            tasks = []
            for at in range(100):
                tasks.append(ask(cluster, 5 + at % 7, GREEDY, f"r{at}"))
                await asyncio.sleep(0.02)
            await asyncio.gather(*tasks)
            assert cluster.workers["d0"].engine.num_output_tokens > 100

    run(main())


@pytest.mark.parametrize("role", ["p0", "both"])
def test_requests_wait_while_who_could_serve_them_is_being_replaced(role):
    async def main() -> None:
        async with sim_cluster(idle_within_s=12.0) as cluster:
            dead = ("p0", "d0") if role == "both" else ("p0",)
            before = ask(cluster, 90)
            await until(lambda: cluster.workers["p0"].engine.num_steps > 1)
            for name in dead:
                await cluster.kill(name)
            await asyncio.sleep(5.0)
            late = ask(cluster, 30)
            await asyncio.sleep(3.0)
            assert not late.done()
            for name in dead:
                await cluster.replace(name)
            assert [await before, await late] == [expected_tokens(prompt_of(n), LONG) for n in (90, 30)]

    run(main())


def test_streams_outlive_more_deaths_than_a_request_may_have_tries_without_a_token():
    async def main() -> None:
        async with sim_cluster(1, 2, router={"max_attempts": 2}, idle_within_s=12.0) as cluster:
            asking = ask(cluster, 20, replace(GREEDY, max_tokens=130))
            for count in (10, 30, 50, 70):
                victim = await tokens_until(cluster, count)
                await cluster.kill(victim)
                await cluster.replace(victim)
            assert await asking == expected_tokens(prompt_of(20), replace(GREEDY, max_tokens=130))

    run(main())


def test_those_who_lost_one_worker_do_not_all_come_back_at_one_moment():
    async def main() -> None:
        async with sim_cluster(1, 2) as cluster:
            tasks = [ask(cluster, length) for length in range(10, 18)]
            await until(lambda: all(len(cluster.workers[name].engine.requests) == 4 for name in ("d0", "d1")))
            await asyncio.sleep(0.05)
            came_s: list[float] = []

            def note(data: bytes) -> Sequence[tuple[float, bytes]]:
                came_s.append(virtual_loop().time())
                return ((0.0, data),)

            cluster.network.fault("Reserve", note)
            await cluster.kill("d0")
            killed_s = virtual_loop().time()
            answers = await asyncio.gather(*tasks)
            assert answers == [expected_tokens(prompt_of(length), LONG) for length in range(10, 18)]
            pauses = [at - killed_s for at in came_s]
            assert len(pauses) >= 4
            # retry_s is 0.2.
            assert 0.1 <= min(pauses) < 0.19

    run(main())


def test_a_router_that_stops_tells_whoever_waits_at_once():
    async def main() -> None:
        async with sim_cluster(num_gpu_blocks_override=30) as cluster:
            # Some decode, some wait for blocks.
            tasks = [ask(cluster, length) for length in range(20, 30)]
            await tokens_until(cluster, 5)
            assert cluster.router.num_queued > 1
            assert cluster.router.num_running > 1
            cluster.pool.refuse()
            began_s = virtual_loop().time()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert {type(result) for result in results} == {UnavailableError}
            assert all("the router is stopping" in str(result) for result in results)
            assert virtual_loop().time() - began_s < 0.1
            assert cluster.pool.ready() == (False, "the router is stopping")

    run(main())
