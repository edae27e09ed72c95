"""A process with a router that keeps jobs and answers without a model: python -m tests.router.job_process URL PORT."""

from __future__ import annotations

import asyncio
import sys
from typing import cast

from router.config import JobsConfig, RouterConfig
from router.router import Router
from router.server import RouterServer
from tests.router.jobs import EchoRouter
from tests.router.scripted import StaticPool, smollm
from tests.router.serving import MODEL

# So that a job takes a while.
PERIOD_S = 0.02


async def serve(url: str, port: int) -> None:
    router = EchoRouter()
    jobs = JobsConfig(url=url, lease_s=2.0, max_in_flight=16)
    ports = RouterConfig(http_port=0, grpc_port=port)
    await RouterServer(cast(Router, router), StaticPool(), smollm(), MODEL, ports, jobs=jobs).start()
    while True:
        await asyncio.sleep(PERIOD_S)
        router.permits.release()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2])))
