"""How urgent a request is and how soon it must be: over HTTP and the native API, and what is said of what cannot be."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cluster.client import AsyncClient
from tests.router.scripted import ScriptedRouter, words
from tests.router.serving import http, serving
from workers.errors import InvalidRequestError, OverloadedError
from workers.request import Slo, Terms

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
}
GOOD: list[tuple[dict[str, Any], Terms]] = [
    ({}, Terms()),
    ({"priority": None, "slo": None}, Terms()),
    ({"priority": -3}, Terms(priority=-3)),
    ({"priority": 100, "slo": {"ttft_ms": 500}}, Terms(priority=100, slo=Slo(ttft_ms=500))),
    ({"slo": {"ttft_ms": 0.5, "tpot_ms": 20.0}}, Terms(slo=Slo(0.5, 20))),
]
BAD: list[tuple[dict[str, Any], str]] = [
    ({"priority": "high"}, "priority"),
    ({"priority": 1.5}, "priority"),
    ({"priority": 2**31}, "priority"),
    ({"slo": 5}, "slo"),
    ({"slo": {"ttft_ms": -1}}, "slo.ttft_ms"),
    ({"slo": {"tpot_ms": 0}}, "slo.tpot_ms"),
    ({"slo": {"tpot_ms": 1e999}}, "slo.tpot_ms"),
]


def test_terms_come_through_http():
    async def main() -> None:
        router = ScriptedRouter(words(" a"))
        async with serving(router) as server, http(server) as client:
            for path, body in BODIES.items():
                for fields, terms in GOOD:
                    assert (await client.post(path, json={**body, **fields})).status_code == 200
                    assert router.terms[-1] == terms
                for fields, param in BAD:
                    content = repr({**body, **fields}).replace("'", '"').replace("inf", "1e999")
                    response = await client.post(path, content=content)
                    assert (response.status_code, response.json()["error"]["param"]) == (400, param), fields

    asyncio.run(main())


def test_terms_come_through_the_native_api():
    async def main() -> None:
        router = ScriptedRouter(words(" a"))
        async with serving(router) as server, AsyncClient(f"127.0.0.1:{server.grpc_port}") as client:
            await client.generate("Hi")
            assert router.terms[-1] == Terms()
            await client.generate("Hi", priority=100, slo={"ttft_ms": 500})
            assert router.terms[-1] == Terms(priority=100, slo=Slo(ttft_ms=500))
            with pytest.raises(InvalidRequestError, match=r"slo\.tpot_ms") as caught:
                await client.generate("Hi", slo={"tpot_ms": float("nan")})
            assert caught.value.param == "slo.tpot_ms"

    asyncio.run(main())


def test_what_cannot_be_served_in_time_is_told_when_to_come_again_at_both_doors():
    late = OverloadedError("about 900 ms are to be expected", code="slo_unattainable", retry_after_s=6.2)

    async def main() -> None:
        async with serving(ScriptedRouter([late])) as server:
            async with http(server) as client:
                for path, body in BODIES.items():
                    for stream in (False, True):
                        response = await client.post(path, json={**body, "stream": stream})
                        assert (response.status_code, response.headers["retry-after"]) == (429, "7")
                        error = response.json()["error"]
                        assert (error["type"], error["code"]) == ("rate_limit_error", "slo_unattainable")
            async with AsyncClient(f"127.0.0.1:{server.grpc_port}") as native:
                with pytest.raises(OverloadedError) as caught:
                    await native.generate("Hi")
                assert (caught.value.code, caught.value.retry_after_s) == ("slo_unattainable", 6.2)

    asyncio.run(main())
