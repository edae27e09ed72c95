"""A worker that registers with another role than its config says: not served by, and shown with the reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from cluster.render import status_title
from cluster.sim.loop import run
from protos import router_pb2
from router.config import RouterConfig
from router.pool import WorkerPool
from router.roles import Member
from router.router import Router
from tests.factories import GREEDY, SimCluster, prompt_of, sim_cluster
from tests.fake_model import expected_tokens
from workers.config import Role
from workers.errors import UnavailableError


@asynccontextmanager
async def configured(cluster: SimCluster, **roles: Role) -> AsyncIterator[tuple[WorkerPool, Router]]:
    """A second router, which knows what these workers should be."""
    addresses = {cluster.workers[name].address: Member(role) for name, role in roles.items()}
    config = RouterConfig(rpc_timeout_s=1.0, worker_wait_s=0.5)
    pool = WorkerPool(addresses, "router-2", config, cluster.network.host())
    await pool.start()
    router = Router(pool, config, "router-2")
    yield pool, router
    await router.stop()
    await pool.stop()


async def answer(router: Router, num_tokens: int = 6) -> list[int]:
    outputs = [output async for output in router.generate(prompt_of(num_tokens), GREEDY, "r")]
    return [token_id for output in outputs for token_id in output.token_ids]


def test_requests_do_not_all_go_to_a_worker_that_should_only_prefill():
    async def main() -> None:
        async with sim_cluster(0, 1, 1) as cluster, configured(cluster, c0="prefill", d0="decode") as (pool, router):
            reason = pool.ready()[1]
            assert reason.startswith("no prefill worker answers: c0 at ")
            assert reason.endswith("its role is colocated, and the config says prefill; restart it with role: prefill")
            with pytest.raises(UnavailableError, match="says that its role is colocated, and the config says prefill"):
                await answer(router)
            assert cluster.workers["c0"].engine.num_steps == 0

    run(main())


def test_the_others_serve_and_status_names_the_wrong_one():
    async def main() -> None:
        roles: dict[str, Role] = {"p0": "prefill", "p1": "decode", "d0": "decode"}
        async with sim_cluster(2, 1) as cluster, configured(cluster, **roles) as (pool, router):
            assert pool.ready() == (True, "")
            assert await answer(router) == expected_tokens(prompt_of(6), GREEDY)
            assert cluster.workers["p1"].engine.num_steps == 0
            shown = {worker.address: worker for worker in pool.status()}[cluster.workers["p1"].address]
            assert shown.state == router_pb2.WORKER_STATE_UNREACHABLE
            title = status_title(router_pb2.GetStatusResponse(workers=pool.status()))
            assert f"p1 at {shown.address} says that its role is prefill, and the config says decode" in title

    run(main())


def test_it_serves_when_it_comes_back_with_its_role():
    async def main() -> None:
        async with sim_cluster(1, 1) as cluster, configured(cluster, p0="prefill", d0="decode") as (pool, router):
            cluster._roles["d0"] = "prefill"
            await cluster.kill("d0")
            await cluster.replace("d0")
            await asyncio.sleep(2.0)
            assert [bool(worker.refused) for worker in pool.workers] == [False, True]
            cluster._roles["d0"] = "decode"
            await cluster.kill("d0")
            await cluster.replace("d0")
            await asyncio.sleep(2.0)
            assert [bool(worker.refused) for worker in pool.workers] == [False, False]
            assert await answer(router) == expected_tokens(prompt_of(6), GREEDY)
            assert cluster.workers["d0"].engine.num_output_tokens > 0

    run(main())
