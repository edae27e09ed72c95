"""Workers that cannot exchange KV: known before any request, or at the first hand-off, and told with the mend."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cluster.sim.loop import run, virtual_loop
from cluster.sim.network import drop
from tests.factories import GREEDY, SimCluster, prompt_of, sim_cluster
from tests.fake_model import expected_tokens
from workers.errors import LayoutMismatchError, OverloadedError

# No pause between tries is as short as that.
AT_ONCE_S = 0.01
LOST_IS_LOST = {"worker_wait_s": 0.0}


async def replace(cluster: SimCluster, name: str, **settings: Any) -> None:
    cluster._worker_settings |= settings
    await cluster.kill(name)
    await cluster.replace(name)
    await asyncio.sleep(2)


async def replace_by_shm(cluster: SimCluster, name: str) -> None:
    """What it can exchange KV with goes by shared memory, and that of the others by grpc."""
    await replace(cluster, name, transfer={"transport": "shm"})


async def ask_all(cluster: SimCluster, count: int = 8) -> int:
    """How many tries it took."""
    num_tries = 0
    for at in range(count):
        prompt = prompt_of(12, seed=at)
        assert await cluster.ask(prompt, GREEDY, f"r{at}") == expected_tokens(prompt, GREEDY)
        num_tries += cluster.router.traces.tell(f"r{at}")[0].num_tries
    return num_tries


async def refused(cluster: SimCluster) -> LayoutMismatchError:
    began_s = virtual_loop().time()
    with pytest.raises(LayoutMismatchError, match="from p0 to d0: KV cannot go by grpc") as caught:
        await cluster.ask(prompt_of(12))
    assert virtual_loop().time() - began_s < AT_ONCE_S
    assert caught.value.http_status == 503
    assert "its transfer.transport allows shm alone" in caught.value.message
    assert "set transfer.transport: grpc on both, or auto" in caught.value.message
    return caught.value


def test_a_pair_that_does_not_fit_is_known_before_any_request_and_answered_at_once():
    async def main() -> None:
        async with sim_cluster(router=LOST_IS_LOST) as cluster:
            await replace_by_shm(cluster, "d0")
            error = await refused(cluster)
            assert cluster.pool.ready() == (False, error.message)
            told = {status.stats.name: status for status in cluster.pool.status()}
            assert "from p0 to d0: KV cannot go by grpc" in told["p0"].unfit[0]
            assert told["d0"].refused.startswith("d0 gets no requests: from p0 to d0")
            # Another incarnation is another pair.
            await replace(cluster, "d0", transfer={"transport": "grpc"})
            assert cluster.pool.ready() == (True, "")
            await ask_all(cluster)

    run(main())


def test_a_pair_that_was_not_asked_in_time_is_known_from_its_first_hand_off():
    async def main() -> None:
        async with sim_cluster(router=LOST_IS_LOST) as cluster:
            cluster.network.fault("ConnectPeer", drop)
            await replace_by_shm(cluster, "d0")
            assert cluster.pool.ready() == (True, "")
            error = await refused(cluster)
            assert cluster.pool.ready() == (False, error.message)
            await refused(cluster)

    run(main())


def test_a_pair_that_does_not_fit_costs_one_try_in_all_while_another_fits():
    async def main() -> None:
        async with sim_cluster(decode=2, router={"policy": "round_robin"}) as cluster:
            cluster.network.fault("ConnectPeer", drop)
            await replace_by_shm(cluster, "d0")
            assert await ask_all(cluster) == 8 + 1
            assert not cluster.workers["d0"].decode.num_frames_received
            ready, reason = cluster.pool.ready()
            assert ready
            assert reason.startswith("d0 gets no requests: from p0 to d0: KV cannot go by grpc")

    run(main())


def test_no_try_is_counted_for_pairs_that_do_not_fit():
    async def main() -> None:
        async with sim_cluster(decode=4, router={"max_attempts": 1}) as cluster:
            cluster.network.fault("ConnectPeer", drop)
            for name in ("d0", "d1", "d2"):
                await replace_by_shm(cluster, name)
            await ask_all(cluster, 1)

    run(main())


def test_a_request_goes_where_there_is_room_though_others_fit_better_elsewhere():
    async def main() -> None:
        async with sim_cluster(2, 2) as cluster:
            await replace_by_shm(cluster, "d1")
            await replace_by_shm(cluster, "p1")
            assert [bool(s.unfit) for s in cluster.pool.status()] == [True, True, False, False]
            assert cluster.pool.ready() == (True, "")

            def full(*_: object) -> None:
                raise OverloadedError("full")

            cluster.workers["d0"].reserve = full  # type: ignore[assignment,method-assign]
            assert await ask_all(cluster, 4) == 4
            assert cluster.workers["d1"].decode.num_frames_received

    run(main())


def test_no_more_than_32_pairs_are_connected_before_there_is_kv():
    async def main() -> None:
        async with sim_cluster(6, 7) as cluster:
            await asyncio.sleep(5)
            connected = [worker.stats().peers for name, worker in cluster.workers.items() if name.startswith("p")]
            assert sum(map(len, connected)) == 32
            # Everybody's first pair comes before anybody's last.
            assert min(map(len, connected)) == 5

    run(main())
