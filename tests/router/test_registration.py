"""A worker whose endpoint is up before it has said who it is: it counts as not there, and is shown so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc.aio
import pytest

from cluster.sim.loop import run, virtual_loop
from cluster.sim.network import Host, SimNetwork, delay
from protos import router_pb2, worker_pb2, worker_pb2_grpc
from router.config import RouterConfig
from router.pool import WorkerPool
from router.router import Router
from tests.factories import GREEDY, make_request, make_worker, prompt_of, sim_cluster
from tests.fake_model import expected_tokens
from workers.errors import UnavailableError
from workers.services import WorkerService
from workers.worker import Worker

WHOLE = {"name": "w", "role": "colocated", "incarnation": "a" * 32, "blocks_total": 8, "blocks_free": 8}


class HalfRegistered(WorkerService):
    """Streams, and tells of itself what it is given to tell."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self.stats: dict[str, Any] = {}

    async def GetStats(self, request: worker_pb2.GetStatsRequest, context: Any) -> worker_pb2.GetStatsResponse:  # noqa: N802
        return worker_pb2.GetStatsResponse(stats=worker_pb2.WorkerStats(**self.stats))

    async def StreamOutputs(  # noqa: N802
        self, request: worker_pb2.StreamOutputsRequest, context: Any
    ) -> AsyncIterator[worker_pb2.StreamOutputsResponse]:
        await context.send_initial_metadata(())
        await asyncio.sleep(1000.0)
        yield worker_pb2.StreamOutputsResponse()


async def with_pool(script: Callable[[HalfRegistered, WorkerPool, Router], Awaitable[None]]) -> None:
    network, config = SimNetwork(), RouterConfig(rpc_timeout_s=1.0, worker_wait_s=2.0)
    host = network.host()
    service = HalfRegistered(make_worker(host))
    server = host.server()
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(service, server)
    address = await host.listen(server, "127.0.0.1", 0)
    pool = WorkerPool([address], "router-1", config, network.host())
    await pool.start()
    router = Router(pool, config, "router-1")
    await script(service, pool, router)
    await router.stop()
    await pool.stop()
    await server.stop(None)


@pytest.mark.parametrize("missing", ["all", "role", "incarnation"])
def test_it_is_shown_as_not_ready_and_requests_are_refused_in_words_until_it_has(missing):
    async def script(service: HalfRegistered, pool: WorkerPool, router: Router) -> None:
        service.stats = {} if missing == "all" else {k: v for k, v in WHOLE.items() if k != missing}
        await asyncio.sleep(2.0)
        assert pool.ready() == (False, "no prefill and no decode worker answers")
        assert [worker.state for worker in pool.status()] == [router_pb2.WORKER_STATE_UNREACHABLE]
        with pytest.raises(UnavailableError, match="no prefill and no decode worker answers; try again"):
            [output async for output in router.generate(prompt_of(3), GREEDY, "r")]
        service.stats = WHOLE
        await asyncio.sleep(1.0)
        assert pool.ready() == (True, "")
        assert [worker.state for worker in pool.status()] == [router_pb2.WORKER_STATE_READY]

    run(with_pool(script))


def test_a_request_that_comes_before_a_worker_has_told_of_itself_waits_for_it():
    async def main() -> None:
        async with sim_cluster() as cluster:
            await cluster.kill("d0")
            await cluster.kill("p0")
            cluster.network.fault("GetStats", delay(1.2), answers=True)
            await cluster.replace("p0")
            await cluster.replace("d0")
            await asyncio.sleep(0.3)
            # Both stream already, and nobody knows yet who they are.
            assert cluster.pool.ready()[0] is False
            assert await cluster.ask(prompt_of(5)) == expected_tokens(prompt_of(5), GREEDY)
            assert virtual_loop().time() > 1.0

    run(main())


class SlowToListen(Host):
    """Its port is open a while before it is told."""

    async def listen(self, server: grpc.aio.Server, host: str, port: int) -> str:
        address = await super().listen(server, host, port)
        await asyncio.sleep(1.0)
        return address


def test_a_worker_whose_port_is_open_before_it_knows_its_address_grants_nothing_yet():
    async def main() -> None:
        worker = make_worker(SlowToListen(SimNetwork()))
        starting = asyncio.create_task(worker.start())
        await asyncio.sleep(0.5)
        with pytest.raises(UnavailableError, match="still starting; try again"):
            worker.reserve(make_request(4))
        await starting
        assert worker.reserve(make_request(4)).address == worker.address
        await worker.stop()

    run(main())
