"""The HTTP API on a real port: OpenAI's own client, and clients that go away."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import openai
import pytest

from tests.router.scripted import HANG, ScriptedRouter, words
from tests.router.serving import router_server, serving, until
from workers.errors import ConfigError, OverloadedError


def client(port: int, **how: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, **how)


def test_openais_client_completes_chats_and_streams():
    async def run() -> None:
        router = ScriptedRouter(words(" one two"))
        async with serving(router) as server, client(server.http_port) as api:
            whole = await api.completions.create(model="smol", prompt="Hi", max_tokens=2)
            assert (whole.choices[0].text, whole.choices[0].finish_reason) == (" one two", "length")
            chat = await api.chat.completions.create(model="smol", messages=[{"role": "user", "content": "Hi"}])
            assert chat.choices[0].message.content == " one two"
            assert chat.usage is not None
            assert chat.usage.completion_tokens == 2
            assert [model.id async for model in api.models.list()] == ["smol"]
            assert (await api.models.retrieve("smol")).owned_by == "kvferry"

            stream = await api.chat.completions.create(
                model="smol",
                messages=[{"role": "user", "content": "Hi"}],
                stream=True,
                stream_options={"include_usage": True},
            )
            *chunks, usage = [chunk async for chunk in stream]
            assert chunks[0].choices[0].delta.role == "assistant"
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == " one two"
            assert (usage.choices, usage.usage is not None) == ([], True)

            texts = {0: "", 1: ""}
            async for piece in await api.completions.create(model="smol", prompt=["a", "b"], stream=True):
                texts[piece.choices[0].index] += piece.choices[0].text
            assert texts == {0: " one two", 1: " one two"}

    asyncio.run(run())


def test_openais_client_sees_typed_errors():
    async def run() -> None:
        async with serving(ScriptedRouter([OverloadedError("full; retry")])) as server, client(server.http_port) as api:
            with pytest.raises(openai.RateLimitError) as limited:
                await api.completions.create(model="smol", prompt="Hi", stream=True)
            assert limited.value.response.headers["retry-after"] == "1"
            with pytest.raises(openai.NotFoundError) as missing:
                await api.completions.create(model="other", prompt="Hi")
            assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
            with pytest.raises(openai.BadRequestError) as bad:
                await api.completions.create(model="smol", prompt="Hi", temperature=-1)
            assert bad.value.param == "temperature"
        late = ScriptedRouter([*words(" a"), OverloadedError("full; retry")])
        async with serving(late) as server, client(server.http_port) as api:
            stream = await api.completions.create(model="smol", prompt="Hi", stream=True)
            with pytest.raises(openai.APIError, match="full; retry"):
                [piece async for piece in stream]

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["Hi", ["Hi", "Hello"]])
@pytest.mark.parametrize("said", ["", " one two"])
def test_a_client_that_goes_away_aborts_its_request_at_once(stream: bool, prompt: str | list[str], said: str):
    async def run() -> None:
        router = ScriptedRouter([*words(said), HANG])
        async with serving(router) as server:
            body = json.dumps({"prompt": prompt, "stream": stream}).encode()
            reader, writer = await asyncio.open_connection("127.0.0.1", server.http_port)
            head = ["POST /v1/completions HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", "", ""]
            writer.write("\r\n".join(head).encode() + body)
            num_choices = 1 if isinstance(prompt, str) else 2
            await until(lambda: router.num_running == num_choices)
            if stream and said:
                await reader.readuntil(b" two")
            writer.close()
            await until(lambda: len(router.aborted) == num_choices)
            assert router.num_running == 0

    asyncio.run(run())


def test_connections_are_kept_alive_after_answers_and_errors():
    async def run() -> None:
        async with serving(ScriptedRouter(words(" a"))) as server:
            limits = httpx.Limits(max_connections=1)
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.http_port}", limits=limits) as http:
                for prompt, status in (("Hi", 200), ("", 400), ("Hi", 200)):
                    for stream in (False, True):
                        response = await http.post("/v1/completions", json={"prompt": prompt, "stream": stream})
                        assert response.status_code == status

    asyncio.run(run())


def test_stop_aborts_what_still_runs():
    async def run() -> None:
        router = ScriptedRouter([*words(" a"), HANG])
        async with serving(router) as server:
            http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.http_port}")
            asking = asyncio.create_task(http.post("/v1/completions", json={"prompt": "Hi", "stream": True}))
            await until(lambda: router.num_running)
            await asyncio.wait_for(server.stop(), 5)
            assert len(router.aborted) == 1
            await asyncio.gather(asking, return_exceptions=True)
            await http.aclose()

    asyncio.run(run())


def test_a_port_in_use_is_named_and_leaves_nothing_behind():
    async def run() -> None:
        async with serving(ScriptedRouter([])) as server:
            for key, ports in (("http_port", (server.http_port, 0)), ("grpc_port", (0, server.grpc_port))):
                taken = ports[0] or ports[1]
                second = router_server(ScriptedRouter([]), *ports)
                with pytest.raises(ConfigError, match=rf"router\.{key}: cannot listen on 127\.0\.0\.1:{taken} "):
                    await second.start()
        again = router_server(ScriptedRouter([]), server.http_port, server.grpc_port)
        await again.start()
        await again.stop()

    asyncio.run(run())


def test_it_serves_from_a_thread_that_is_not_the_main_one():
    failures: list[BaseException] = []

    async def run() -> None:
        async with serving(ScriptedRouter(words(" a"))) as server, client(server.http_port) as api:
            assert (await api.completions.create(model="smol", prompt="Hi")).choices[0].text == " a"

    def thread() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:  # noqa: BLE001  It is raised in the main thread.
            failures.append(error)

    worker = threading.Thread(target=thread)
    worker.start()
    worker.join(20)
    assert not worker.is_alive()
    assert not failures
