"""A RouterServer on free ports over a scripted router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx

from router.config import RouterConfig
from router.router import Router
from router.server import RouterServer
from tests.router.scripted import ScriptedRouter, StaticPool, smollm
from workers.config import ModelConfig

MODEL = ModelConfig(served_model_name=("smol",), max_model_len=64)


def router_server(router: ScriptedRouter, http_port: int = 0, grpc_port: int = 0, **settings: Any) -> RouterServer:
    config = RouterConfig(http_port=http_port, grpc_port=grpc_port, **settings)
    return RouterServer(cast(Router, router), StaticPool(), smollm(), MODEL, config)


@asynccontextmanager
async def serving(router: ScriptedRouter, **settings: Any) -> AsyncIterator[RouterServer]:
    """`settings`: of RouterConfig."""
    server = router_server(router, **settings)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def http(server: RouterServer, key: str | None = None) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.http_port}", headers=headers)


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(2):
        while not holds():  # noqa: ASYNC110  What is waited for is another side's doing.
            await asyncio.sleep(0.01)
