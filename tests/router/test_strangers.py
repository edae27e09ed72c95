"""Decode workers that cannot take the KV of every prefill worker: no request fails for it where another can."""

from __future__ import annotations

import asyncio

import pytest

from cluster.sim.loop import run
from tests.factories import GREEDY, SimCluster, sim_cluster
from tests.fake_model import expected_tokens
from workers.errors import LayoutMismatchError


async def replace_with_a_stranger(cluster: SimCluster, name: str) -> None:
    await cluster.kill(name)
    cluster._worker_settings["fingerprint"] = "other"
    await cluster.replace(name)
    await asyncio.sleep(2)


async def ask_all(cluster: SimCluster) -> None:
    for at in range(8):
        prompt = list(range(at, at + 12))
        assert await cluster.ask(prompt, GREEDY, f"r{at}") == expected_tokens(prompt, GREEDY)


def test_a_decode_worker_with_other_weights_gets_no_requests_and_is_named() -> None:
    async def main() -> None:
        async with sim_cluster(decode=2) as cluster:
            await replace_with_a_stranger(cluster, "d1")
            ready, reason = cluster.pool.ready()
            assert ready
            assert "d1 computes with other weights or kernels" in reason
            await ask_all(cluster)
            assert not cluster.workers["d1"].decode.num_frames_received

    run(main())


def test_where_no_decode_worker_can_take_any_kv_nothing_is_served_until_one_can() -> None:
    async def main() -> None:
        async with sim_cluster() as cluster:
            await replace_with_a_stranger(cluster, "d0")
            ready, reason = cluster.pool.ready()
            assert not ready
            assert "d0 computes with other weights or kernels than p0; start both from one config" in reason
            with pytest.raises(LayoutMismatchError, match="other weights or kernels"):
                await cluster.ask([1, 2, 3])
            # Prefill workers decode while no decode worker is there, not in place of one that could never work.
            await cluster.kill("d0")
            await asyncio.sleep(2)
            await ask_all(cluster)

    run(main())


def test_a_pair_that_does_not_fit_is_not_tried_twice_while_another_does() -> None:
    async def main() -> None:
        async with sim_cluster(prefill=2, decode=2) as cluster:
            await replace_with_a_stranger(cluster, "d1")
            await replace_with_a_stranger(cluster, "p1")
            await ask_all(cluster)

    run(main())
