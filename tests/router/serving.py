"""A RouterServer on free ports over a scripted router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import cast

from router.config import RouterConfig
from router.router import Router
from router.server import RouterServer
from tests.router.scripted import ScriptedRouter, StaticPool, smollm
from workers.config import ModelConfig

MODEL = ModelConfig(served_model_name=("smol",), max_model_len=64)


def router_server(
    router: ScriptedRouter, http_port: int = 0, grpc_port: int = 0, model: ModelConfig = MODEL
) -> RouterServer:
    config = RouterConfig(http_port=http_port, grpc_port=grpc_port)
    return RouterServer(cast(Router, router), StaticPool(), smollm(), model, config)


@asynccontextmanager
async def serving(router: ScriptedRouter, model: ModelConfig = MODEL) -> AsyncIterator[RouterServer]:
    server = router_server(router, model=model)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(2):
        while not holds():  # noqa: ASYNC110  What is waited for is another side's doing.
            await asyncio.sleep(0.01)
