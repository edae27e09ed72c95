"""With keys set, whatever path or method is asked for: nothing is told without one, but to the probes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
from fastapi import FastAPI

from protos import router_pb2
from router.config import JobsConfig
from router.server import RouterServer
from tests.router.test_api_keys import key_file
from tests.router.whole import Whole, whole_router

OPEN = {"/health", "/ready"}
METHODS = ("GET", "POST", "DELETE", "OPTIONS", "PUT")
UNKNOWN = ("/", "/nowhere", "/health/", "/HEALTH", "/v1", "/v1/../health", "//health", "/docs", "/openapi.json")


def app_of(server: RouterServer) -> FastAPI:
    assert server._http is not None
    app = server._http.config.app
    assert isinstance(app, FastAPI)
    return app


def paths_of(app: FastAPI) -> Iterator[str]:
    for route in app.routes:
        path: str = route.path  # type: ignore[attr-defined]
        yield re.sub(r"{[^}]*}", "one", path)


def test_every_http_path_says_401_without_a_key(tmp_path: Path):
    async def main() -> None:
        path, keys = key_file(tmp_path, acme={})
        jobs = JobsConfig(url=f"sqlite:///{tmp_path}/jobs.sqlite")
        async with whole_router(jobs=jobs, api_keys=str(path)) as whole:
            known = set(paths_of(app_of(whole.serving.server)))
            assert {"/v1/completions", "/v1/chat/completions", "/v1/files/one/content", "/metrics", *OPEN} <= known
            async with whole.client() as client:
                await asyncio.gather(*(require_401_unless_open(client, place) for place in known | set(UNKNOWN)))
                with_key = {"authorization": f"Bearer {keys['acme']}"}
                assert (await client.get("/v1/models", headers=with_key)).status_code == 200

    asyncio.run(main())


async def require_401_unless_open(client: httpx.AsyncClient, place: str) -> None:
    for method in METHODS:
        answer = await client.send(httpx.Request(method, f"{client.base_url}".rstrip("/") + place))
        if answer.request.url.path in OPEN:
            assert answer.status_code == (200 if method == "GET" else 405), (method, place)
        else:
            assert answer.status_code == 401, (method, place)
            assert answer.headers["content-type"] == "application/json"


def methods() -> Iterator[str]:
    for name in ("RouterService", "JobService"):
        service = router_pb2.DESCRIPTOR.services_by_name[name]
        yield from (f"/{service.full_name}/{method.name}" for method in service.methods)
    yield from ("/kvferry.v1.RouterService/Unknown", "/grpc.health.v1.Health/Check", "/nowhere/At")


def test_every_grpc_method_says_unauthenticated_without_a_key(tmp_path: Path):
    async def main() -> None:
        path, _ = key_file(tmp_path, acme={})
        jobs = JobsConfig(url=f"sqlite:///{tmp_path}/jobs.sqlite")
        async with whole_router(jobs=jobs, api_keys=str(path)) as whole:
            for method in methods():
                for metadata in ((), (("authorization", "Bearer no"),)):
                    assert await code_of(whole, method, metadata) is grpc.StatusCode.UNAUTHENTICATED, method

    asyncio.run(main())


async def code_of(whole: Whole, method: str, metadata: Any) -> grpc.StatusCode:
    async with grpc.aio.insecure_channel(whole.grpc_target) as channel:
        ask: Any = channel.stream_stream(method)
        code: grpc.StatusCode = await ask(iter([b""]), metadata=metadata, timeout=5).code()
        return code
