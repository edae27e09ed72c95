"""Ready follows the workers as they come and go, not the start-up: in the pool, in status and over HTTP."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from cluster.sim.loop import run
from router.openai.app import build_app
from router.pool import WorkerPool
from tests.factories import SimCluster, sim_cluster
from tests.router.scripted import ScriptedRouter, text_service
from tests.router.test_pool import handle_of


async def over_http(pool: WorkerPool) -> tuple[int, str]:
    """What a load balancer is told."""
    transport = httpx.ASGITransport(build_app(text_service(ScriptedRouter([])), pool))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        response = await client.get("/ready")
    return response.status_code, response.json().get("reason", "")


async def die(cluster: SimCluster, name: str) -> None:
    await cluster.kill(name)
    await asyncio.sleep(0.001)


async def fall_silent(cluster: SimCluster, name: str) -> None:
    cluster.hosts[name].pause()
    await asyncio.sleep(2.0)


@pytest.mark.parametrize("end", [die, fall_silent])
@pytest.mark.parametrize(
    ("places", "gone", "status", "reason"),
    [
        ((1, 1, 0), "p0", 503, "no prefill worker answers"),
        ((0, 0, 1), "c0", 503, "no prefill and no decode worker answers"),
        ((1, 1, 0), "d0", 200, "no decode worker answers: prefill workers decode"),
        ((2, 1, 0), "p0", 200, ""),
        ((1, 1, 1), "p0", 200, ""),
    ],
)
def test_it_turns_when_a_worker_goes_and_again_when_it_is_back(places, gone, status, reason, end):
    async def main() -> None:
        async with sim_cluster(*places) as cluster:
            assert await over_http(cluster.pool) == (200, "")
            await end(cluster, gone)
            assert not handle_of(cluster, gone).reachable
            assert await over_http(cluster.pool) == (status, reason)
            if end is die:
                await cluster.replace(gone)
            else:
                cluster.hosts[gone].resume()
            await asyncio.sleep(1.0)
            assert await over_http(cluster.pool) == (200, "")

    run(main())
