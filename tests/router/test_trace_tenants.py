"""Who may see what became of a request."""

from __future__ import annotations

import asyncio

import pytest

from router.traces import Traces
from tests.router.serving import http
from tests.router.test_api_keys import grpc_client, key_file
from tests.router.whole import GOOD, whole_router
from workers.errors import NotFoundError


def test_a_tenant_sees_its_own_requests_only_and_to_look_costs_nothing(tmp_path):
    path, keys = key_file(tmp_path, acme={}, other={"requests_per_minute": 1})
    asked = [("acme", "mine-7"), ("acme", "same"), ("other", "same")]

    async def main() -> None:
        async with whole_router(api_keys=str(path)) as whole:
            server = whole.serving.server
            for tenant, request_id in asked:
                async with http(server, keys[tenant]) as client:
                    response = await client.post("/v1/completions", json=GOOD, headers={"x-request-id": request_id})
                    assert response.status_code == 200
            async with grpc_client(server, keys["acme"]) as acme, grpc_client(server, keys["other"]) as other:
                assert [len(await acme.trace(one)) for one in ("same", "mine-7", "mine")] == [1, 1, 1]
                assert len(await other.trace("same")) == 1
                for foreign in ("mine-7", "mine"):
                    with pytest.raises(NotFoundError):
                        await other.trace(foreign)

    asyncio.run(main())


def test_what_all_generated_ids_begin_with_is_no_id():
    async def main() -> None:
        traces = Traces(10)
        for name in ("chatcmpl-0f3a9", "job-1.0", "job-1.17", "mine-1.0f3a9b2c"):
            traces.end(traces.begin(name, 1, 0.0), "stop", 1.0)
        assert [len(traces.tell(one)) for one in ("chatcmpl-0f3a9", "job-1", "mine")] == [1, 2, 1]
        for beginning in ("chatcmpl", "chat", ""):
            with pytest.raises(NotFoundError):
                traces.tell(beginning)

    asyncio.run(main())
