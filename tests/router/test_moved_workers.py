"""A worker that comes back on another node, at another address, is the same worker to its routers."""

from __future__ import annotations

import asyncio

from cluster.sim.loop import run
from router.roles import Member
from tests.factories import prompt_of, sim_cluster
from tests.fake_model import expected_tokens
from workers.request import SamplingParams

PARAMS = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)


def test_a_stream_that_lost_its_only_worker_goes_on_where_that_comes_back():
    async def main() -> None:
        async with sim_cluster(0, 0, 1) as cluster:
            asking = asyncio.create_task(cluster.ask(prompt_of(10), PARAMS))
            await asyncio.sleep(0.1)
            former = cluster.workers["c0"].address
            assert cluster.workers["c0"].engine.requests
            await cluster.kill("c0")
            await asyncio.sleep(2.0)
            worker = await cluster.replace_elsewhere("c0")
            assert worker.address != former
            await asyncio.sleep(2.0)
            # Nobody has told.
            assert cluster.pool.ready()[0] is False
            await cluster.pool.set_workers({worker.address: Member()})
            assert await asking == expected_tokens(prompt_of(10), PARAMS)
            assert [w.address for w in cluster.pool.workers] == [worker.address]

    run(main())


def test_what_a_moved_worker_has_cached_is_known_again_and_the_rest_stays():
    async def main() -> None:
        async with sim_cluster(1, 1, enable_prefix_caching=True, hash_block_size=4) as cluster:
            await cluster.ask(prompt_of(64), request_id="before")
            await cluster.kill("p0")
            worker = await cluster.replace_elsewhere("p0")
            await cluster.pool.set_workers({one.address: Member() for one in cluster.workers.values()})
            kept = {w.stats.name: w.stats.incarnation for w in cluster.pool.workers}
            assert kept == {name: cluster.workers[name].incarnation for name in ("p0", "d0")}
            await cluster.ask(prompt_of(64, seed=1), request_id="after")
            await asyncio.sleep(1.0)
            assert cluster.pool.index._bits.keys() >= {worker.incarnation}
            assert cluster.pool.num_indexed_blocks >= len(worker.engine.block_manager.known_hashes) > 0

    run(main())
