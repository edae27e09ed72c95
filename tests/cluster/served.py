"""A simulated cluster behind the native API: our client asks at one address, where routers die and others follow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from cluster.client import AsyncClient, Completion, completion_of
from cluster.records import Options, Prompt
from cluster.sim.network import Host
from protos import router_pb2, router_pb2_grpc
from router.grpc_service import RouterService
from router.pool import WorkerPool
from router.router import Router
from router.text import TextService
from tests.factories import SimCluster, sim_cluster
from tests.router.scripted import smollm
from workers.rpc import Network

HOST, PORT = "router", 8001
TARGET = f"{HOST}:{PORT}"


@dataclass
class LiveRouter:
    host: Host
    router: Router
    pool: WorkerPool
    requests: list[router_pb2.GenerateRequest]

    async def kill(self) -> None:
        """As kill -9: nothing more of it reaches anybody."""
        self.host.kill()
        await self.router.stop()
        await self.pool.stop()


class _Service(RouterService):
    """Remembers what it was asked for."""

    def __init__(self, text: TextService, router: Router, requests: list[router_pb2.GenerateRequest]) -> None:
        super().__init__(text, router_pb2.GetStatusResponse, router.audit, router.traces)
        self._requests = requests

    async def Generate(self, request: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        self._requests.append(request)
        await super().Generate(request, context)


class Served:
    def __init__(self, cluster: SimCluster) -> None:
        self.cluster = cluster
        self.num_routers = 0
        client_host = cluster.network.host()
        self.client = AsyncClient(TARGET, channel=client_host.connect(TARGET))

    async def launch(self) -> None:
        """The next incarnation of the router, where the last one was."""
        self.num_routers += 1
        host, incarnation = self.cluster.network.host(), f"{self.num_routers:032x}"
        addresses = [worker.address for worker in self.cluster.workers.values()]
        config = self.cluster.router._config
        network: Network = host
        pool = WorkerPool(addresses, incarnation, config, network)
        await pool.start()
        router = Router(pool, config, incarnation)
        requests: list[router_pb2.GenerateRequest] = []
        text = TextService(router, smollm(), ["m"], max_model_len=160, vocab_size=49152)
        server = host.server()
        router_pb2_grpc.add_RouterServiceServicer_to_server(_Service(text, router, requests), server)
        await host.listen(server, HOST, PORT)
        self.live = LiveRouter(host, router, pool, requests)

    async def kill_router(self, back_after_s: float) -> None:
        await self.live.kill()
        await asyncio.sleep(back_after_s)
        await self.launch()

    async def ask(
        self, prompt: Prompt, options: Options, kill_at: Sequence[int] = (), gone_s: float = 2.0
    ) -> Completion:
        """The whole answer; after so many pieces of it, the router dies and is back a while later."""
        chunks, deaths = [], []
        async for chunk in self.client.stream(prompt, **options):
            chunks.append(chunk)
            if len(chunks) in kill_at and self.live.host.alive:
                self.live.host.kill()
                deaths.append(asyncio.create_task(self.kill_router(gone_s)))
        await asyncio.gather(*deaths)
        for choice in {chunk.choice for chunk in chunks}:
            own = [chunk for chunk in chunks if chunk.choice == choice]
            assert [chunk.index for chunk in own] == [
                sum(len(before.token_ids) for before in own[:at]) for at in range(len(own))
            ]
        return completion_of(chunks)


@asynccontextmanager
async def served(prefill: int = 1, decode: int = 1, **settings: Any) -> AsyncIterator[Served]:
    """At its end no block of any worker is taken, once the lease of a router that died is over."""
    async with sim_cluster(prefill, decode, **{"idle_within_s": 12.0} | settings) as cluster:
        served = Served(cluster)
        await served.launch()
        try:
            yield served
        finally:
            await served.client.close()
            await served.live.kill()
