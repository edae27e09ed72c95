"""C10: what failed is never a 200 with an odd finish_reason."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from router.openai import build_app
from tests.router.scripted import ScriptedRouter, StaticPool, text_service, words
from workers.errors import KVFerryError, UnavailableError
from workers.request import FinishReason

BODIES = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
}
FAILURES = {
    "a worker's ERROR output": lambda said: ScriptedRouter(words(said) or [[]], FinishReason.ERROR),
    "a worker's ABORTED output": lambda said: ScriptedRouter(words(said) or [[]], FinishReason.ABORTED),
    "outputs that end without a reason": lambda said: ScriptedRouter(words(said), None),
    "a lost worker": lambda said: ScriptedRouter([*words(said), UnavailableError("worker p0 is gone")]),
    "an error of no type": lambda said: ScriptedRouter([*words(said), KVFerryError("broken")]),
}


def post(router: ScriptedRouter, path: str, stream: bool) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(build_app(text_service(router), StaticPool()))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.post(path, json={**BODIES[path], "stream": stream})

    return asyncio.run(ask())


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("said", ["", " one two"])
def test_c10_a_whole_answer_that_failed_is_an_error(path, failure, said):
    response = post(FAILURES[failure](said), path, stream=False)
    assert response.status_code >= 499
    assert response.json().keys() == {"error"}
    assert response.json()["error"]["message"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("failure", FAILURES)
def test_c10_a_stream_that_failed_before_its_first_piece_is_an_error(path, failure):
    response = post(FAILURES[failure](""), path, stream=True)
    assert response.status_code >= 499
    assert response.json().keys() == {"error"}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("failure", FAILURES)
def test_c10_a_stream_that_failed_later_ends_with_an_error_and_no_finish_reason(path, failure):
    response = post(FAILURES[failure](" one two"), path, stream=True)
    *pieces, last = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
    assert last.keys() == {"error"}
    assert not any(choice["finish_reason"] for piece in pieces for choice in piece["choices"])
    assert "[DONE]" not in response.text
