"""Who is there: noticed at once when a stream breaks, within a bound when a worker falls silent."""

from __future__ import annotations

import asyncio

import pytest

from cluster.sim.loop import run, virtual_loop
from cluster.sim.network import drop
from protos import router_pb2
from router.pool import WorkerPool
from router.worker_handle import WorkerHandle
from tests.factories import SimCluster, prompt_of, sim_cluster
from tests.fake_model import expected_tokens
from workers.errors import UnavailableError
from workers.request import SamplingParams

HEARTBEAT_S = 0.5
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def handle_of(cluster: SimCluster, name: str) -> WorkerHandle:
    return next(w for w in cluster.pool.workers if w.address == cluster.workers[name].address)


def test_all_workers_are_known_with_their_roles_when_the_pool_has_started():
    async def main() -> None:
        async with sim_cluster(2, 1, 1) as cluster:
            assert [(w.stats.name, w.role, w.reachable) for w in cluster.pool.workers] == [
                ("p0", "prefill", True), ("p1", "prefill", True), ("d0", "decode", True), ("c0", "colocated", True),
            ]  # fmt: skip
            assert cluster.pool.ready() == (True, "")
            assert cluster.pool.whole_role() is None
            assert [w.stats.name for w in cluster.pool.candidates("decode")] == ["d0"]

    run(main())


def test_a_dead_worker_is_out_at_once_and_does_not_come_back_for_an_instant():
    async def main() -> None:
        async with sim_cluster(1, 2) as cluster:
            handle = handle_of(cluster, "d1")
            await cluster.kill("d1")
            await asyncio.sleep(0.001)
            assert not handle.reachable
            looks = 0
            while virtual_loop().time() < 10.0:
                # As those do who wait for room: whenever something may have changed.
                await cluster.pool.changed.wait()
                cluster.pool.changed.clear()
                assert not handle.reachable
                looks += 1
            assert looks > 50
            assert handle.status().state == router_pb2.WORKER_STATE_UNREACHABLE

    run(main())


def test_a_new_incarnation_at_the_same_address_is_taken_up_and_served_by():
    async def main() -> None:
        async with sim_cluster() as cluster:
            await cluster.ask(prompt_of(10), request_id="before")
            old = cluster.workers["d0"].incarnation
            await cluster.kill("d0")
            await asyncio.sleep(3.0)
            assert cluster.pool.ready() == (True, "no decode worker answers: prefill workers decode")
            await cluster.replace("d0")
            await asyncio.sleep(1.0)
            handle = handle_of(cluster, "d0")
            assert handle.reachable
            assert handle.stats.incarnation == cluster.workers["d0"].incarnation != old
            for length in (3, 50):
                answer = await cluster.ask(prompt_of(length), PARAMS, f"after{length}")
                assert answer == expected_tokens(prompt_of(length), PARAMS)

    run(main())


def test_a_silent_worker_is_unreachable_after_three_heartbeats_and_its_requests_go_elsewhere():
    async def main() -> None:
        async with sim_cluster(1, 2, idle_within_s=12.0) as cluster:
            params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
            asking = asyncio.create_task(cluster.ask(prompt_of(10), params))
            await asyncio.sleep(0.1)
            (busy,) = (name for name in ("d0", "d1") if cluster.workers[name].engine.requests)
            address, began = cluster.workers[busy].address, virtual_loop().time()
            hooks = [
                cluster.network.fault(method, drop, answers=answers, to=address)
                for method in ("GetStats", "StreamOutputs", "Abort")
                for answers in (True, False)
            ]
            while handle_of(cluster, busy).reachable:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert virtual_loop().time() - began < 4.5 * HEARTBEAT_S
            assert await asking == expected_tokens(prompt_of(10), params)
            for hook in hooks:
                hook.remove()

    run(main())


def test_one_lost_heartbeat_changes_nothing():
    async def main() -> None:
        async with sim_cluster() as cluster:
            cluster.network.fault("GetStats", drop, count=1)
            handle = handle_of(cluster, "d0")
            await asyncio.sleep(1.0)
            assert handle.reachable

    run(main())


def test_a_pool_starts_though_a_worker_does_not_answer():
    async def main() -> None:
        async with sim_cluster(1, 2, router={"rpc_timeout_s": 2.0}) as cluster:
            await cluster.pool.stop()
            await cluster.kill("d1")
            began = virtual_loop().time()
            addresses = [worker.address for worker in cluster.workers.values()]
            pool = WorkerPool(addresses, "router-2", cluster.router._config, cluster.router_host)
            await pool.start()
            assert virtual_loop().time() - began == pytest.approx(2.0, abs=0.1)
            assert [w.reachable for w in pool.workers] == [True, True, False]
            await pool.stop()

    run(main())


def test_what_waits_for_a_worker_hears_of_its_death_at_once():
    async def main() -> None:
        async with sim_cluster(1, 1, router={"max_attempts": 1}) as cluster:
            params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
            asking = asyncio.create_task(cluster.ask(prompt_of(10), params))
            await asyncio.sleep(0.1)
            began = virtual_loop().time()
            await cluster.kill("d0")
            with pytest.raises(UnavailableError, match="d0 is gone"):
                await asking
            assert virtual_loop().time() - began < 0.01

    run(main())
