"""A whole router on real sockets, over a prefill and a decode worker with the fake model: all in this process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from cluster.verify import unaccounted, wrong_books
from router.config import JobsConfig, RouterConfig
from router.server import Identity, Serving, serve
from tests.factories import in_use, make_config
from tests.fake_model import HashRunner
from tests.router.scripted import smollm
from workers.config import ModelConfig
from workers.engine.executor import Executor
from workers.worker import Worker

MODEL = ModelConfig(served_model_name=("smol",), max_model_len=128)
GOOD = {"prompt": "Hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@dataclass
class Whole:
    serving: Serving
    workers: list[Worker]

    @property
    def http_port(self) -> int:
        return self.serving.server.http_port

    @property
    def grpc_target(self) -> str:
        return f"127.0.0.1:{self.serving.server.grpc_port}"

    def client(self, **how: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.http_port}", timeout=30, **how)

    async def until_idle(self, within_s: float = 5.0) -> None:
        """Nothing waits, runs or is held, anywhere, and all books add up."""
        async with asyncio.timeout(within_s):
            while self._busy():  # noqa: ASYNC110  What is waited for is a worker's doing.
                await asyncio.sleep(0.01)
        audits = [await self.serving.router.audit()]
        assert [*wrong_books(audits), *unaccounted(audits)] == []

    def _busy(self) -> bool:
        router, pool = self.serving.router, self.serving.pool
        return bool(router.num_queued or router.num_running or sum(w.num_queued_tokens for w in pool.workers)) or any(
            in_use(worker) for worker in self.workers
        )


@asynccontextmanager
async def whole_router(
    worker: dict[str, Any] | None = None,
    jobs: JobsConfig | None = None,
    identity: Identity = Identity(cluster_name="test"),  # noqa: B008  It is frozen.
    **router: Any,
) -> AsyncIterator[Whole]:
    """At its end all is idle. `worker`: settings of both workers; the others are the router's."""
    workers = [
        Worker(
            make_config(**{"num_gpu_blocks_override": 256, **(worker or {}), "name": role, "role": role}),
            make_executor=lambda config: Executor(HashRunner(config)),
        )
        for role in ("prefill", "decode")
    ]
    addresses = [await one.start() for one in workers]
    config = RouterConfig(http_port=0, grpc_port=0, **router)
    serving = await serve(identity, config, MODEL, smollm(), addresses, jobs)
    try:
        whole = Whole(serving, workers)
        yield whole
        await whole.until_idle()
    finally:
        await serving.stop()
        for one in workers:
            await one.stop()


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
