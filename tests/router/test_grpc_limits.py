"""What the native API does not take or tell: messages that are too large, and what is every tenant's."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from cluster.cli import run as command
from cluster.client import AsyncClient, Client
from protos import router_pb2 as pb
from protos import router_pb2_grpc
from tests.router.jobs import jobs_config, open_router, serving_jobs
from tests.router.scripted import ScriptedRouter, words
from tests.router.serving import serving
from tests.router.test_api_keys import grpc_client, key_file
from workers.errors import InvalidRequestError, PermissionDeniedError


def test_a_job_that_is_larger_than_a_body_may_be_is_refused_with_the_limit_and_the_mend(tmp_path):
    async def main() -> None:
        router = open_router()
        async with serving_jobs(router, jobs_config(tmp_path), max_body_bytes=10_000) as served:
            async with AsyncClient(f"127.0.0.1:{served.server.grpc_port}") as client:
                prompt = "a " * 20
                job = await client.submit([prompt] * 100)
                assert len(await job) == 100
                with pytest.raises(InvalidRequestError, match=r"takes 10000 .*max_body_bytes.*in parts.*/v1/files"):
                    await client.submit([prompt] * 300)
                with pytest.raises(InvalidRequestError, match="max_body_bytes"):
                    await client.generate("a" * 10_001)
                assert [one.id for one in await client.jobs.list()] == [job.id]
            # Refused by its length, before it is read, to whoever sends it.
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await served.jobs.SubmitJob(pb.SubmitJobRequest(requests=[pb.GenerateRequest(text="a" * 60_000_000)]))
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "vs. 10000)" in (caught.value.details() or "")

    asyncio.run(main())


def test_who_may_not_audit_sees_nothing_of_other_tenants(tmp_path):
    path, keys = key_file(tmp_path, acme={}, ops={"admin": True})

    async def main() -> None:
        async with serving(ScriptedRouter(words(" a")), api_keys=str(path)) as server:
            target = f"127.0.0.1:{server.grpc_port}"

            def audit(key: str) -> pb.AuditRouterResponse:
                with Client(target, api_key=key) as client:
                    return client.audit()

            with pytest.raises(PermissionDeniedError, match="kvferry keys new --admin"):
                await asyncio.to_thread(audit, keys["acme"])
            assert (await asyncio.to_thread(audit, keys["ops"])).incarnation == "router-1"
            # An admin's key is a key like any other otherwise.
            async with grpc_client(server, keys["ops"]) as native:
                await native.generate("Hi")

    asyncio.run(main())


@pytest.mark.parametrize(("tenant", "code", "says"), [("acme", 1, "kvferry keys new --admin"), ("ops", 0, "")])
def test_verify_wants_an_admins_key_where_keys_are_asked_for(tmp_path, capsys, monkeypatch, tenant, code, says):
    path, keys = key_file(tmp_path, acme={}, ops={"admin": True})
    monkeypatch.setenv("KVFERRY_API_KEY", keys[tenant])

    async def main() -> int:
        async with serving(ScriptedRouter(words(" a")), api_keys=str(path)) as server:
            return await asyncio.to_thread(command, ["verify", "--target", f"127.0.0.1:{server.grpc_port}"])

    assert asyncio.run(main()) == code
    shown = capsys.readouterr()
    assert says in shown.err
    assert ("clean" in shown.out) == (code == 0)


def test_without_keys_whoever_comes_may_audit():
    async def main() -> None:
        async with serving(ScriptedRouter(words(" a"))) as server:
            stub = router_pb2_grpc.RouterServiceStub(grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}"))
            assert (await stub.AuditRouter(pb.AuditRouterRequest())).incarnation == "router-1"

    asyncio.run(main())
