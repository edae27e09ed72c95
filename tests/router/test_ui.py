"""/ui without a browser: what is served, to whom, how much, and what of a request it tells."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from protos import router_pb2, worker_pb2
from router.activity import activity_of
from router.ui.state import cluster_object, requests_object
from tests.router.scripted import ScriptedRouter, words
from tests.router.serving import http, serving
from tests.router.test_api_keys import key_file
from tests.router.whole import GOOD, whole_router
from workers.request import TokenOutput
from workers.timeline import Timeline

PAGE = Path(__file__).parents[2] / "router/ui/page"
PATHS = ("/ui", "/ui/", "/ui/state", *(f"/ui/{file.name}" for file in PAGE.iterdir()))


def basic(password: str, name: str = "anybody") -> dict[str, str]:
    return {"authorization": "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()}


def test_every_file_is_served_with_its_type_and_may_load_nothing_from_elsewhere():
    types = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

    async def main() -> None:
        async with serving(ScriptedRouter(words(" a"))) as server, http(server) as client:
            moved = await client.get("/ui")
            assert (moved.status_code, moved.headers["location"]) == (307, "ui/")
            assert (await client.get("/ui/")).text == (PAGE / "index.html").read_text()
            for file in PAGE.iterdir():
                response = await client.get(f"/ui/{file.name}")
                assert response.content == file.read_bytes()
                assert response.headers["content-type"].partition(";")[0] == types[file.suffix]
                assert response.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self';")
            for nowhere in ("/ui/nothing.js", "/ui/../server.py", "/ui/%2e%2e/state.py", "/ui/routes.py"):
                assert (await client.get(nowhere)).status_code == 404

    asyncio.run(main())


def test_no_file_names_another_place():
    for file in PAGE.iterdir():
        places = set(re.findall(r"(?:https?:)?//[\w.]+\.\w+[\w./]*", file.read_text()))
        # A name of a language, which nobody asks for.
        assert places <= {"http://www.w3.org/2000/svg"}, file.name


def test_no_markup_is_made_of_text():
    for file in PAGE.glob("*.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|eval\(", file.read_text()
        )


def test_with_keys_nothing_is_shown_without_one_and_a_browser_is_told_how_to_ask(tmp_path):
    path, keys = key_file(tmp_path, acme={})

    async def main() -> None:
        async with serving(ScriptedRouter(words(" a")), api_keys=str(path)) as server, http(server) as client:
            for place in PATHS:
                for headers in (
                    {},
                    basic("no"),
                    basic(""),
                    {"authorization": "Basic !"},
                    {"authorization": "Bearer no"},
                ):
                    response = await client.get(place, headers=headers)
                    assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
                    assert response.headers["www-authenticate"].startswith("Basic realm=")
                for headers in (
                    basic(keys["acme"]),
                    basic(keys["acme"], ""),
                    {"authorization": f"Bearer {keys['acme']}"},
                ):
                    assert (await client.get(place, headers=headers)).status_code in (200, 307)

    asyncio.run(main())


def test_a_browsers_way_to_give_a_key_is_no_way_to_anything_but_the_page(tmp_path):
    path, keys = key_file(tmp_path, acme={})

    async def main() -> None:
        router = ScriptedRouter(words(" a"))
        async with serving(router, api_keys=str(path)) as server, http(server) as client:
            for place in ("/v1/models", "/metrics", "/uix", "/v1/completions"):
                for response in (
                    await client.get(place, headers=basic(keys["acme"])),
                    await client.post(place, json={"prompt": "Hi"}, headers=basic(keys["acme"])),
                ):
                    assert response.status_code == 401
                    assert "www-authenticate" not in response.headers
        assert router.calls == []

    asyncio.run(main())


def test_a_tenant_sees_its_own_requests_an_admin_all_and_to_look_costs_nothing(tmp_path):
    path, keys = key_file(tmp_path, acme={"requests_per_minute": 1}, other={}, boss={"admin": True})

    async def main() -> None:
        async with whole_router(api_keys=str(path)) as whole:
            server = whole.serving.server
            for tenant in ("acme", "other"):
                async with http(server, keys[tenant]) as client:
                    response = await client.post("/v1/completions", json=GOOD, headers={"x-request-id": f"of-{tenant}"})
                    assert response.status_code == 200
            sees = {"acme": {"of-acme"}, "other": {"of-other"}, "boss": {"of-acme", "of-other"}}
            for tenant, ids in sees.items():
                async with http(server, keys[tenant]) as client:
                    state = (await client.get("/ui/state")).json()
                    assert {request["id"] for request in state["requests"]} == ids
                    assert state["latency"]["ttft"]["count"] == len(ids)

    asyncio.run(main())


def test_a_requests_phases_are_those_of_its_trace_one_after_the_other():
    async def main() -> None:
        async with whole_router() as whole, whole.client() as client:
            body = GOOD | {"prompt": "Hello " * 40, "max_tokens": 24}
            assert (
                await client.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
            ).status_code == 200
            state = (await client.get("/ui/state")).json()
            assert {worker["role"] for worker in state["workers"]} == {"prefill", "decode"}
            for worker in state["workers"]:
                assert sum(worker["blocks"]) == 256
            (request,) = state["requests"]
            (trace,) = whole.serving.router.traces.tell("mine")
            assert (request["outcome"], request["tokens"]) == ("length", 24)
            (one,) = request["tries"]
            assert (one["prefill"], one["decode"]) == ("prefill", "decode")
            phases = {name: (began, seconds) for name, began, seconds in one["phases"]}
            times = trace.tries[0].timeline
            for name in ("prefill", "transfer", "decode"):
                assert phases[name][1] == pytest.approx(getattr(times, f"{name}_s"), abs=1e-4)
            ends = {name: sum(phase) for name, phase in phases.items()}
            # The transfer ends where decode begins, whatever of it went on beside prefill.
            assert ends["prefill"] <= ends["transfer"] + 1e-3
            assert phases["decode"][0] >= ends["transfer"] - 1e-3
            assert ends["decode"] == pytest.approx(request["elapsed"], abs=0.05)

    asyncio.run(main())


def many_workers(count: int) -> list[router_pb2.WorkerStatus]:
    return [
        router_pb2.WorkerStatus(
            address=f"worker-{at}.somewhere.example:9000",
            state=router_pb2.WORKER_STATE_READY,
            stats=worker_pb2.WorkerStats(
                name=f"{role}-{at}",
                role=role,
                incarnation=f"{at:032x}",
                blocks_total=10**6,
                blocks_free=10**6,
                num_output_tokens=10**9,
                peers=[worker_pb2.PeerStats(incarnation=f"{n:032x}", transport="grpc") for n in range(count // 2)],
            ),
        )
        for at in range(count)
        for role in (("prefill", "decode")[at % 2],)
    ]


def busy_traces(router: ScriptedRouter, count: int) -> None:
    """Long ids, and each tried several times without success."""
    router.traces._max_ended = count
    for at in range(count):
        trace = router.traces.begin(f"{at:0128}", 8000, 0.0)
        for _ in range(5):
            one = trace.begin([0], 0.0)
            one.placed("prefill-123", "decode-123", 0.1)
            one.hear(TokenOutput("r", 0, (1,), None, Timeline(0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1)))
            one.fail("x" * 2000, 2.0)
        router.traces.end(trace, "UnavailableError: " + "x" * 2000, 3.0)


def test_with_200_workers_and_1000_requests_it_is_small_and_quickly_made():
    async def main() -> None:
        router = ScriptedRouter(words(" a"))
        busy_traces(router, 1000)
        async with serving(router) as server, http(server) as client:
            server._pool.workers = many_workers(200)  # type: ignore[attr-defined]
            response = await client.get("/ui/state")
            assert (len(response.json()["workers"]), len(response.json()["requests"])) == (200, 80)
            assert len(response.content) < 200_000
            took_s = []
            for _ in range(5):
                began_s = time.perf_counter()
                json.dumps(cluster_object(server.status()) | requests_object(activity_of(router.traces, None)))
                took_s.append(time.perf_counter() - began_s)
            # 10 ms and less where nothing else runs.
            assert min(took_s) < 0.1

    asyncio.run(main())


def test_what_its_workers_have_not_told_yet_is_a_phase_that_goes_on():
    def phases(*heard: Timeline) -> list[Any]:
        router = ScriptedRouter(words(" a"))
        one = router.traces.begin("r", 7, 0.0).begin([0], 0.0)
        if heard:
            one.placed("p", "d", 0.0)
        for index, timeline in enumerate(heard[1:]):
            one.hear(TokenOutput("r", index, (1,), None, timeline))
        trace = router.traces._running["r"].to_proto(5.0)
        (told,) = requests_object(router_pb2.GetActivityResponse(traces=[trace]))["requests"]
        return [(name, seconds is None) for name, _, seconds in told["tries"][0]["phases"]]

    prefilled = Timeline(prefill_s=1.0)
    decoding = prefilled | Timeline(transfer_s=1.0, transfer_unhidden_s=0.5, decode_s=0.1)
    assert phases() == [("queued", True)]
    assert phases(Timeline()) == [("prefill", True)]
    assert phases(Timeline(), prefilled) == [("prefill", False), ("transfer", True)]
    assert phases(Timeline(), prefilled, decoding) == [
        ("prefill", False),
        ("transfer", False),
        ("decode", False),
        ("decode", True),
    ]
