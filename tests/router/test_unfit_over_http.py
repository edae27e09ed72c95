"""Real workers with a forced transport that cannot work between them, as a client and who starts them see it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest

from cluster.render import status_object, status_title
from protos import router_pb2
from router.config import RouterConfig
from router.openai.app import build_app
from router.pool import WorkerPool
from router.router import Router
from router.server import Serving
from router.text import TextService
from tests.factories import make_config
from tests.fake_model import HashRunner
from tests.router.scripted import smollm
from workers.engine.executor import Executor
from workers.errors import LayoutMismatchError
from workers.kv_transfer.base import Refusal
from workers.kv_transfer.shm import ShmTransport
from workers.rpc import GrpcNetwork
from workers.worker import Worker

CONTAINER = Refusal("it is on the same host, but the shared memory of process 7 cannot be read here", is_fault=True)
ANOTHER_HOST = Refusal("it is on another host")
ROLES = ("prefill", "decode")


@asynccontextmanager
async def serving(transport: str) -> AsyncIterator[tuple[WorkerPool, httpx.AsyncClient]]:
    async with AsyncExitStack() as stack:
        workers = []
        for role in ROLES:
            config = make_config(name=role, role=role, transfer={"transport": transport})
            worker = Worker(config, make_executor=lambda config: Executor(HashRunner(config)))
            await worker.start()
            stack.push_async_callback(worker.stop)
            workers.append(worker)
        settings = RouterConfig(heartbeat_s=0.2)
        pool = WorkerPool([worker.address for worker in workers], "router-1", settings, GrpcNetwork())
        await pool.start()
        stack.push_async_callback(pool.stop)
        router = Router(pool, settings, "router-1")
        stack.push_async_callback(router.stop)
        text = TextService(router, smollm(), ["smol"], max_model_len=160, vocab_size=49152)
        asgi = httpx.ASGITransport(build_app(text, pool))
        client = await stack.enter_async_context(httpx.AsyncClient(transport=asgi, base_url="http://test"))
        yield pool, client


def told(pool: WorkerPool) -> router_pb2.GetStatusResponse:
    ready, _ = pool.ready()
    return router_pb2.GetStatusResponse(name="test", ready=ready, workers=pool.status())


async def complete(client: httpx.AsyncClient) -> httpx.Response:
    question: Mapping[str, object] = {"model": "smol", "prompt": "Hello", "max_tokens": 2}
    return await client.post("/v1/completions", json=question)


def test_a_forced_transport_that_cannot_work_is_refused_at_start_up_in_readiness_and_in_answers(monkeypatch):
    monkeypatch.setattr(ShmTransport, "refusal", lambda self, offer: CONTAINER)

    async def main() -> None:
        async with serving("shm") as (pool, client):
            with pytest.raises(LayoutMismatchError, match="KV cannot go by shm"):
                Serving(None, None, pool).require_pair()  # type: ignore[arg-type]
            ready = await client.get("/ready")
            began_s = time.monotonic()
            answer = await complete(client)
            assert time.monotonic() - began_s < 0.5
            assert (ready.status_code, answer.status_code) == (503, 503)
            reason = answer.json()["error"]["message"]
            assert ready.json()["reason"] == reason
            assert "from prefill to decode: KV cannot go by shm" in reason
            assert f"not shm: {CONTAINER.reason}" in reason
            assert "set transfer.transport: grpc on both, or auto" in reason
            status = told(pool)
            assert [bool(worker["refused"]) for worker in status_object(status)["workers"]] == [True, True]
            assert "decode gets no requests: from prefill to decode: KV cannot go by shm" in status_title(status)

    asyncio.run(main())


@pytest.mark.parametrize(("refusal", "level"), [(CONTAINER, "WARNING"), (ANOTHER_HOST, "INFO")])
def test_auto_goes_by_grpc_and_says_why_not_by_memory(refusal, level, monkeypatch, caplog):
    monkeypatch.setattr(ShmTransport, "refusal", lambda self, offer: refusal)
    caplog.set_level("INFO")

    async def main() -> None:
        async with serving("auto") as (pool, client):
            Serving(None, None, pool).require_pair()  # type: ignore[arg-type]
            assert (await complete(client)).status_code == 200
            await asyncio.sleep(0.3)
            status = told(pool)
            (peer,) = status_object(status)["workers"][0]["peers"]
            assert (peer["transport"], peer["why"]) == ("grpc", f"not shm: {refusal.reason}")
            assert f"KV goes by grpc, not shm: {refusal.reason}: from prefill to decode" in status_title(status)

    asyncio.run(main())
    (said,) = [record for record in caplog.records if "goes by" in record.message]
    assert said.levelname == level
    assert f"goes by grpc (not shm: {refusal.reason})" in said.message
