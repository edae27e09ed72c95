"""Every answer carries the id of its request, whatever becomes of it; OpenAI's client reads what kvferry adds."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.router.openai_calls import call
from tests.router.scripted import TIMELINE, ScriptedRouter, words
from tests.router.serving import serving
from tests.router.test_openai_server import client
from workers.errors import ConflictError, OverloadedError, UnavailableError

HEADERS = {"X-Request-Id": "mine"}
FINE = {"prompt": "Hi"}
ERRORS = {
    400: ("POST", "/v1/completions", {"prompt": 3}, None),
    404: ("GET", "/v1/nothing", None, None),
    405: ("DELETE", "/v1/completions", None, None),
    409: ("POST", "/v1/completions", FINE, ConflictError("sent again")),
    429: ("POST", "/v1/completions", FINE, OverloadedError("full")),
    500: ("POST", "/v1/completions", FINE, RuntimeError("a bug")),
    503: ("POST", "/v1/completions", FINE, UnavailableError("nobody")),
}


@pytest.mark.parametrize("status", ERRORS)
def test_an_error_carries_the_id_once(status):
    method, path, body, error = ERRORS[status]
    router = ScriptedRouter([error] if error else words(" one"))
    response = call(router, method, path, json=body, headers=HEADERS)
    assert response.status_code == status
    assert response.headers.get_list("x-request-id") == ["mine"]
    assert "application/json" in response.headers["content-type"]


def test_openais_client_reads_the_timeline_of_whole_and_streamed_answers():
    how: Any = {"model": "smol", "extra_headers": {"X-Kvferry-Timeline": "1"}}
    shown = {name: getattr(TIMELINE, name) for name in type(TIMELINE).__slots__}

    async def main() -> None:
        async with serving(ScriptedRouter(words(" one two"))) as server, client(server.http_port) as api:
            whole = await api.completions.create(prompt="Hi", **how)
            assert whole.model_extra == {"kvferry": {"timeline": shown}}
            stream = await api.chat.completions.create(
                messages=[{"role": "user", "content": "Hi"}], stream=True, stream_options={"include_usage": True}, **how
            )
            *chunks, last, usage = [chunk async for chunk in stream]
            assert last.choices[0].finish_reason == "length"
            assert last.model_extra == {"kvferry": {"timeline": shown}}
            assert [chunk.model_extra for chunk in (*chunks, usage)] == [{}] * (len(chunks) + 1)

    asyncio.run(main())
