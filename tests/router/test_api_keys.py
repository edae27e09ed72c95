"""API keys at both doors of a router: who is let in, as whom, how often, and what is never told."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import openai
import pytest

from cluster.client import AsyncClient
from cluster.keys import new_key
from cluster.routers import Routers
from router.server import RouterServer
from router.tenants import KeyRing
from router.text import seed_of
from tests.router.scripted import ScriptedRouter, words
from tests.router.serving import http, serving
from workers.errors import AuthenticationError, ConfigError, InvalidRequestError, OverloadedError
from workers.request import Slo, Terms

OPEN = ("/health", "/ready")
CLOSED = ("/v1/models", "/metrics", "/v1/completions", "/nowhere", "/health/")


def key_file(folder: Path, **tenants: dict[str, Any]) -> tuple[Path, dict[str, str]]:
    """The file, and the key of each tenant."""
    made = {tenant: new_key({"tenant": tenant, **limits}) for tenant, limits in tenants.items()}
    path = folder / "keys.yaml"
    path.write_text("keys:\n" + "\n".join(line for _, line in made.values()))
    return path, {tenant: key for tenant, (key, _) in made.items()}


def grpc_client(server: RouterServer, key: str | None = None) -> AsyncClient:
    return AsyncClient(f"127.0.0.1:{server.grpc_port}", api_key=key)


def test_without_a_key_or_with_a_wrong_one_only_probes_are_answered(tmp_path):
    path, _ = key_file(tmp_path, acme={})

    async def main() -> None:
        router = ScriptedRouter(words(" a"))
        async with serving(router, api_keys=str(path)) as server:
            for said in (b"", b"Bearer no", b"Basic x", b"\xff", b"Bearer \xff"):
                headers = {b"authorization": said}
                async with http(server) as client:
                    for place in CLOSED:
                        response = await client.post(place, json={"prompt": "Hi"}, headers=headers)
                        assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
                        assert response.json()["error"].keys() == {"message", "type", "param", "code"}
                    assert [(await client.get(place)).status_code for place in OPEN] == [200, 200]
            for key in (None, "no"):
                async with grpc_client(server, key) as native:
                    with pytest.raises(AuthenticationError):
                        await native.generate("Hi")
                    with pytest.raises(AuthenticationError):
                        await native.status()
        assert router.calls == []

    asyncio.run(main())


def test_a_key_makes_its_tenants_requests_at_both_doors_and_their_seeds(tmp_path, monkeypatch):
    path, keys = key_file(tmp_path, acme={}, other={})

    async def main() -> None:
        router = ScriptedRouter(words(" a"))
        async with serving(router, api_keys=str(path)) as server:
            for tenant, key in keys.items():
                base_url = f"http://127.0.0.1:{server.http_port}/v1"
                async with openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as api:
                    extra = {"priority": 5, "slo": {"ttft_ms": 100.0}}
                    headers = {"x-request-id": "mine"}
                    await api.completions.create(model="smol", prompt="Hi", extra_body=extra, extra_headers=headers)
                assert router.terms[-1] == Terms(tenant, 5, Slo(ttft_ms=100.0))
                monkeypatch.setenv("KVFERRY_API_KEY", key)
                async with grpc_client(server) as native:
                    await native.generate("Hi", request_id="mine", priority=3, slo={"tpot_ms": 50.0})
                assert router.terms[-1] == Terms(tenant, 3, Slo(tpot_ms=50.0))
        seeds = [params.seed for _, params, _ in router.calls]
        assert seeds == [seed_of("mine", tenant) for tenant in keys for _ in range(2)]
        assert len(set(seeds)) == 2

    asyncio.run(main())


def test_a_key_may_be_no_more_urgent_than_it_says(tmp_path):
    path, keys = key_file(tmp_path, batch={"max_priority": 100}, vip={"max_priority": -5})

    async def main() -> None:
        async with serving(ScriptedRouter(words(" a")), api_keys=str(path)) as server:
            async with http(server, keys["batch"]) as client:
                response = await client.post("/v1/completions", json={"prompt": "Hi", "priority": 99})
                assert (response.status_code, response.json()["error"]["param"]) == (400, "priority")
                response = await client.post("/v1/completions", json={"prompt": "Hi", "priority": 100})
                assert response.status_code == 200
            async with grpc_client(server, keys["vip"]) as native:
                await native.generate("Hi", priority=-5)
                with pytest.raises(InvalidRequestError, match="priority is -6"):
                    await native.generate("Hi", priority=-6)

    asyncio.run(main())


def test_requests_over_the_rate_are_told_when_to_come_again(tmp_path):
    path, keys = key_file(tmp_path, slow={"requests_per_minute": 2}, free={})

    async def main() -> None:
        async with (
            serving(ScriptedRouter(words(" a")), api_keys=str(path)) as server,
            http(server, keys["slow"]) as client,
        ):
            left = []
            for _ in range(2):
                response = await client.post("/v1/completions", json={"prompt": "Hi"})
                left.append(response.headers["x-ratelimit-remaining-requests"])
            assert left == ["1", "0"]
            assert (await client.get("/v1/models")).status_code == 200
            response = await client.post("/v1/completions", json={"prompt": "Hi"})
            assert (response.status_code, response.json()["error"]["code"]) == (429, "rate_limit_exceeded")
            assert response.headers["x-ratelimit-limit-requests"] == "2"
            assert 25 < int(response.headers["retry-after"]) <= 30
            async with grpc_client(server, keys["slow"]) as native:
                with pytest.raises(OverloadedError) as caught:
                    await native.generate("Hi")
                assert 25 < caught.value.retry_after_s <= 30
                await native.status()
            async with http(server, keys["free"]) as other:
                response = await other.post("/v1/completions", json={"prompt": "Hi"})
                assert response.status_code == 200
                assert not [name for name in response.headers if name.startswith("x-ratelimit")]

    asyncio.run(main())


def test_tokens_of_prompts_and_answers_count_and_what_is_used_up_is_refused(tmp_path):
    path, keys = key_file(tmp_path, small={"tokens_per_minute": 20})

    async def main() -> None:
        router = ScriptedRouter(words(" one two three four"))
        async with serving(router, api_keys=str(path)) as server, http(server, keys["small"]) as client:
            body = {"prompt": [5] * 10, "max_tokens": 4}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            response = await client.get("/v1/models")
            assert response.headers["x-ratelimit-remaining-tokens"] == "6"
            refused = await client.post("/v1/completions", json=body)
            # 10 are wanted, 6 are left, and 20 come in a minute.
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "12")
            assert (await client.post("/v1/completions", json={"prompt": [5] * 4})).status_code == 200
        assert len(router.calls) == 2

    asyncio.run(main())


def test_the_prompts_of_one_request_are_charged_together_or_not_at_all(tmp_path):
    path, keys = key_file(tmp_path, small={"tokens_per_minute": 20})

    async def main() -> None:
        router = ScriptedRouter(words(" one"))
        async with serving(router, api_keys=str(path)) as server, http(server, keys["small"]) as client:
            for prompts, status in (([[5] * 10, []], 400), ([[5] * 8, [5] * 8], 200), ([[5] * 2, [5] * 8], 429)):
                response = await client.post("/v1/completions", json={"prompt": prompts, "max_tokens": 1})
                assert response.status_code == status
            response = await client.get("/v1/models")
            # Of two prompts of 8 and a token for each.
            assert response.headers["x-ratelimit-remaining-tokens"] == "2"
            # More than there ever is needs all that there is, as one prompt of as many tokens does.
            response = await client.post("/v1/completions", json={"prompt": [[5] * 20, [5] * 20], "max_tokens": 1})
            assert (response.status_code, response.headers["retry-after"]) == (429, "54")

    asyncio.run(main())


def test_a_prompt_that_is_refused_for_want_of_room_costs_nothing(tmp_path):
    path, keys = key_file(tmp_path, small={"tokens_per_minute": 20})

    async def main() -> None:
        router = ScriptedRouter([OverloadedError("full; retry later")])
        async with serving(router, api_keys=str(path)) as server, http(server, keys["small"]) as client:
            for _ in range(3):
                response = await client.post("/v1/completions", json={"prompt": [5] * 10})
                assert (response.status_code, response.json()["error"]["message"]) == (429, "full; retry later")
            response = await client.get("/v1/models")
            assert response.headers["x-ratelimit-remaining-tokens"] == "20"

    asyncio.run(main())


def test_the_file_is_read_again_when_it_changes_and_a_broken_one_changes_nothing(tmp_path, caplog):
    path, keys = key_file(tmp_path, acme={"requests_per_minute": 1})
    old = path.read_text()

    async def main() -> None:
        ring = KeyRing(str(path))
        bearer = f"Bearer {keys['acme']}"
        ring.caller(bearer).take_request()
        key, line = new_key({"tenant": "new"})
        path.write_text(f"{old}\n{line}")
        assert ring.caller(f"Bearer {key}").key.tenant == "new"
        # What it has spent is spent.
        with pytest.raises(OverloadedError):
            ring.caller(bearer).take_request()
        path.write_text("keys: [{tenant: x, sha256: SECRET}]")
        assert ring.caller(bearer).key.tenant == "acme"
        os.unlink(path)
        assert ring.caller(bearer).key.tenant == "acme"
        path.write_text(f"keys:\n{line}")
        with pytest.raises(AuthenticationError):
            ring.caller(bearer)

    asyncio.run(main())
    assert "the keys stay as they were" in caplog.text
    assert "SECRET" not in caplog.text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "No such file"),
        ("keys: [", "not valid YAML"),
        ("", "kvferry keys new"),
        ("keys: [{tenant: x, sha256: abc}]", "keys.0.sha256"),
        ("keys: []\nmore: 1", "more"),
    ],
)
def test_a_file_of_keys_that_cannot_be_used_is_an_error_at_the_start(tmp_path, text, says):
    path = tmp_path / "keys.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=says) as caught:
        KeyRing(str(path))
    assert caught.value.param == "router.api_keys"


def test_keys_are_neither_logged_nor_shown(tmp_path, caplog):
    path, keys = key_file(tmp_path, acme={})
    caplog.set_level("DEBUG")

    async def main() -> str:
        async with (
            serving(ScriptedRouter(words(" a")), api_keys=str(path)) as server,
            http(server, keys["acme"]) as client,
        ):
            await client.post("/v1/completions", json={"prompt": "Hi"})
            await client.post("/v1/completions", content="{", headers={"authorization": f"Bearer {keys['acme']}x"})
            async with grpc_client(server, keys["acme"]) as native:
                await native.generate("Hi")
                shown = str(await native.status())
            return shown + (await client.get("/metrics")).text

    shown = asyncio.run(main())
    digest = json.loads(path.read_text().partition("- ")[2])["sha256"]
    ours = [
        record
        for record in caplog.records
        if record.name.partition(".")[0] in ("router", "workers", "cluster", "uvicorn")
    ]
    for secret in (keys["acme"], digest):
        assert secret not in shown
        assert not [record for record in ours if secret in record.getMessage()]
        assert secret not in repr(Routers("here:1", keys["acme"]))


def test_a_page_of_another_origin_may_ask_only_where_the_config_says_so(tmp_path):
    path, keys = key_file(tmp_path, acme={})
    preflight = {
        "origin": "https://app.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }

    async def main() -> None:
        async with serving(ScriptedRouter(words(" a"))) as server, http(server) as client:
            response = await client.options("/v1/completions", headers=preflight)
            assert response.status_code == 405
            assert "access-control-allow-origin" not in response.headers
        config: dict[str, Any] = {"api_keys": str(path), "cors_origins": ("https://app.example",)}
        async with serving(ScriptedRouter(words(" a")), **config) as server, http(server, keys["acme"]) as client:
            # Browsers ask this without the key.
            del client.headers["authorization"]
            response = await client.options("/v1/completions", headers=preflight)
            assert response.status_code == 200
            assert response.headers["access-control-allow-origin"] == "https://app.example"
            for key, status in ((keys["acme"], 200), ("wrong", 401)):
                headers = {"origin": "https://app.example", "authorization": f"Bearer {key}"}
                response = await client.post("/v1/completions", json={"prompt": "Hi"}, headers=headers)
                assert response.status_code == status
                assert response.headers["access-control-allow-origin"] == "https://app.example"
            response = await client.options("/v1/completions", headers=preflight | {"origin": "https://evil.example"})
            assert "access-control-allow-origin" not in response.headers

    asyncio.run(main())
