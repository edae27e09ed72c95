"""Calls of the HTTP API over an ASGI transport, and what its answers must look like."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from router.openai.app import build_app
from tests.router.scripted import ScriptedRouter, StaticPool, text_service, words

OPENAPI = Path(__file__).parents[3] / "shared/data/openapi/openai_openapi_subset.json"
HI = {"messages": [{"role": "user", "content": "Hi"}]}


def call(router: ScriptedRouter, method: str, path: str, pool: StaticPool | None = None, **how: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        app = build_app(text_service(router), pool or StaticPool())
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **how)

    return asyncio.run(run())


def post(path: str, body: Any, router: ScriptedRouter | None = None, **how: Any) -> httpx.Response:
    return call(router or ScriptedRouter(words(" one two")), "POST", f"/v1{path}", json=body, **how)


def events(response: httpx.Response) -> list[Any]:
    """The data of each event; the last is "[DONE]" of a stream that succeeded."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines.pop() == ""
    assert all(line.startswith("data: ") for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


def check_error(response: httpx.Response, status: int, param: str | None = None, kind: str = "invalid_request_error"):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == (kind, param)
    assert "\n" not in error["message"]
    assert response.headers["x-request-id"]
    return error


def usage_of(prompt: int, completion: int, cached: int = 0) -> dict[str, Any]:
    details = {"cached_tokens": cached}
    total = prompt + completion
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}
    return {**counts, "prompt_tokens_details": details}


def nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """OpenAPI 3.0's `nullable`, which the description still uses here and there, in JSON Schema's words."""
    return {"anyOf": [{"type": "null"}, schema]} if schema.pop("nullable", False) is True else schema


def check_schema(body: Any, name: str) -> None:
    if not OPENAPI.is_file():
        pytest.skip(f"needs OpenAI's description at {OPENAPI}")
    document = json.loads(OPENAPI.read_text(), object_hook=nullable)
    validator = jsonschema.Draft202012Validator({"$ref": f"#/components/schemas/{name}", **document})
    validator.validate(body)
