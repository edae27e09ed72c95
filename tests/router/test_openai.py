"""The HTTP API's shapes, over an ASGI transport."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from protos import router_pb2
from protos.worker_pb2 import WorkerStats
from router.openai.app import build_app
from tests.router.openai_calls import HI, call, check_error, check_schema, events, post, usage_of
from tests.router.scripted import HANG, ScriptedRouter, StaticPool, smollm, text_service, words
from workers.errors import OverloadedError, UnavailableError
from workers.request import FinishReason


def test_a_completion_has_openais_shape():
    router = ScriptedRouter(words(" one two"))
    response = post("/completions", {"model": "smol", "prompt": "Hi", "max_tokens": 2}, router)
    body = response.json()
    check_schema(body, "CreateCompletionResponse")
    assert (body["object"], body["model"]) == ("text_completion", "smol")
    assert body["id"].startswith("cmpl-")
    assert response.headers["x-request-id"] == body["id"]
    assert body["choices"] == [{"index": 0, "text": " one two", "logprobs": None, "finish_reason": "length"}]
    assert body["usage"] == usage_of(1, 2)


def test_a_chat_completion_has_openais_shape():
    body = post("/chat/completions", HI, ScriptedRouter(words("one two"), FinishReason.STOP)).json()
    check_schema(body, "CreateChatCompletionResponse")
    assert body["id"].startswith("chatcmpl-")
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "one", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 2


def test_a_streamed_completion():
    body = {"prompt": "Hi", "stream": True, "stream_options": {"include_usage": True}}
    *pieces, usage, done = events(post("/completions", body))
    for piece in [*pieces, usage]:
        assert (piece["object"], piece["id"][:5], piece["model"]) == ("text_completion", "cmpl-", "smol")
    assert [piece["choices"][0]["text"] for piece in pieces] == [" one", " two"]
    assert [piece["choices"][0]["finish_reason"] for piece in pieces] == [None, "length"]
    assert [piece["usage"] for piece in pieces] == [None, None]
    assert (usage["choices"], usage["usage"]) == ([], usage_of(1, 2))
    assert done == "[DONE]"


def test_a_streamed_chat_completion():
    router = ScriptedRouter(words("one two 🤗"))
    *pieces, done = events(post("/chat/completions", {**HI, "stream": True}, router))
    for piece in pieces:
        check_schema(piece, "CreateChatCompletionStreamResponse")
        assert "usage" not in piece
    deltas = [piece["choices"][0]["delta"] for piece in pieces]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all(set(delta) == {"content"} for delta in deltas[1:])
    assert "".join(delta["content"] for delta in deltas) == "one two 🤗"
    assert [piece["choices"][0]["finish_reason"] for piece in pieces[-2:]] == [None, "length"]
    assert done == "[DONE]"


def test_several_prompts_are_several_choices():
    router = ScriptedRouter(words(" one two"))
    prompts = ("Hi", "Hello there")
    body = post("/completions", {"prompt": list(prompts), "seed": 5}, router, headers={"X-Request-Id": "mine"}).json()
    assert body["id"] == "mine"
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, " one two"), (1, " one two")]
    assert body["usage"] == usage_of(3, 4)
    assert sorted((ids, request_id) for ids, _, request_id in router.calls) == sorted(
        (smollm().encode(prompt), f"mine-{at}") for at, prompt in enumerate(prompts)
    )


def test_several_prompts_streamed():
    *pieces, done = events(post("/completions", {"prompt": [[5, 6], [7]], "stream": True}))
    for index in (0, 1):
        own = [piece["choices"][0] for piece in pieces if piece["choices"][0]["index"] == index]
        assert [choice["text"] for choice in own] == [" one", " two"]
        assert own[-1]["finish_reason"] == "length"
    assert done == "[DONE]"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("max_tokens", "said"), [(2, " one two"), (0, "")])
def test_echo(stream: bool, max_tokens: int, said: str):
    router = ScriptedRouter(words(" one two"))
    body = {"prompt": ["Hi", smollm().encode("Hello")], "echo": True, "max_tokens": max_tokens, "stream": stream}
    response = post("/completions", body, router)
    texts = {0: "", 1: ""}
    for piece in events(response)[:-1] if stream else [response.json()]:
        for choice in piece["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {0: "Hi" + said, 1: "Hello" + said}
    assert len(router.calls) == (2 if max_tokens else 0)
    if not stream:
        assert response.json()["usage"]["completion_tokens"] == 2 * max_tokens


def test_parameters_reach_the_router():
    router = ScriptedRouter(words("x"))
    sampling = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "seed": 7,
        "ignore_eos": True,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "presence_penalty": -1,
        "frequency_penalty": 0.5,
        "min_tokens": 2,
    }
    lists = {"stop_token_ids": [9], "logit_bias": {"12": -100, "7": 2.5}}
    extras = {"prompt_logprobs": 3, "cache_salt": "mine", "user": "u", "unheard_of": 1}
    post("/completions", {"prompt": "Hi", "max_tokens": 3, **sampling, **lists, **extras, "logprobs": 0}, router)
    chat_body = {**HI, "max_tokens": 3, "max_completion_tokens": 4, **sampling, **lists, **extras}
    post("/chat/completions", {**chat_body, "logprobs": True, "top_logprobs": 20}, router)
    post("/completions", {"prompt": "Hi"}, router)
    post("/chat/completions", HI, router)
    (_, one, _), (_, two, _), (_, three, _), (chat, four, _) = router.calls
    for params in (one, two):
        assert {name: getattr(params, name) for name in sampling} == sampling
        assert (params.stop_token_ids, params.logit_bias) == ((9,), ((7, 2.5), (12, -100)))
    assert [(params.logprobs, params.prompt_logprobs) for params in (one, two)] == [(0, 3), (20, 3)]
    assert [(params.logprobs, params.prompt_logprobs) for params in (three, four)] == [(None, None)] * 2
    assert router.salts == ["mine", "mine", "", ""]
    assert (one.max_tokens, two.max_tokens) == (3, 4)
    # OpenAI's default for completions; what the context leaves for chats.
    assert (three.max_tokens, four.max_tokens) == (16, 64 - len(chat))


def test_stop_strings():
    for stop in ("two", ["never", "two"]):
        router = ScriptedRouter([*words(" one two three"), HANG])
        body = post("/completions", {"prompt": "Hi", "stop": stop}, router).json()
        assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == (" one ", "stop")
        assert body["usage"]["completion_tokens"] == 2
        assert len(router.aborted) == 1


def test_parts_of_text_are_joined():
    router = ScriptedRouter(words("x"))
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    post("/chat/completions", {"messages": [{"role": "user", "content": parts}]}, router)
    assert "one\ntwo" in smollm().decode(router.calls[0][0])


NO_OPS: dict[str, Any] = {"n": 1, "best_of": None, "logit_bias": {}, "presence_penalty": 0.0, "frequency_penalty": 0}
CHAT_NO_OPS = {
    "logprobs": False,
    "tools": [],
    "tool_choice": "none",
    "response_format": {"type": "text"},
    "audio": None,
}


def test_unsupported_parameters_are_accepted_where_they_change_nothing():
    assert post("/completions", {"prompt": "Hi", **NO_OPS, "suffix": None}).status_code == 200
    assert post("/chat/completions", {**HI, **NO_OPS, **CHAT_NO_OPS}).status_code == 200


def test_unknown_models_paths_and_methods():
    error = check_error(post("/completions", {"prompt": "Hi", "model": "gpt-9"}), 404, "model")
    assert error["code"] == "model_not_found"
    check_error(call(ScriptedRouter([]), "GET", "/v1/models/gpt-9"), 404, "model")
    check_error(call(ScriptedRouter([]), "GET", "/v1/nothing"), 404)
    response = call(ScriptedRouter([]), "GET", "/v1/completions")
    check_error(response, 405)
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_the_first_token_is_a_plain_http_error(stream: bool):
    busy = OverloadedError("1024 requests wait already; retry later")
    busy.retry_after_s = 2.5
    for error, status, kind, wait in (
        (busy, 429, "rate_limit_error", "3"),
        (UnavailableError("no decode worker answers; retry later"), 503, "server_error", "1"),
    ):
        response = post("/chat/completions", {**HI, "stream": stream}, ScriptedRouter([error]))
        check_error(response, status, kind=kind)
        assert response.headers["retry-after"] == wait


@pytest.mark.parametrize("error", [UnavailableError("decode-0 died"), RuntimeError("a secret of ours")])
def test_a_failure_mid_stream_ends_it_with_an_error(error: Exception):
    *pieces, last = events(
        post("/completions", {"prompt": "Hi", "stream": True}, ScriptedRouter([*words(" a"), error]))
    )
    assert [piece["choices"][0]["text"] for piece in pieces] == [" a"]
    assert last["error"]["type"] == "server_error"
    assert "secret" not in last["error"]["message"]


def test_one_failed_choice_fails_a_whole_answer():
    router = ScriptedRouter([*words(" a"), UnavailableError("decode-0 died")])
    check_error(post("/completions", {"prompt": ["a", "b"]}, router), 503, kind="server_error")


def test_an_error_of_ours_is_no_leak():
    error = check_error(
        post("/completions", {"prompt": "Hi"}, ScriptedRouter([RuntimeError("secret")])), 500, kind="server_error"
    )
    assert "secret" not in error["message"]


def test_models():
    body = call(ScriptedRouter([]), "GET", "/v1/models").json()
    check_schema(body, "ListModelsResponse")
    assert [card["id"] for card in body["data"]] == ["smol", "alias/smol"]
    card = call(ScriptedRouter([]), "GET", "/v1/models/alias/smol").json()
    check_schema(card, "Model")
    assert (card["id"], card["max_model_len"]) == ("alias/smol", 64)


def test_request_ids_come_back():
    router = ScriptedRouter(words("x"))
    response = post("/chat/completions", HI, router, headers={"X-Request-Id": "trace-1"})
    assert (response.headers["x-request-id"], response.json()["id"], router.calls[0][2]) == ("trace-1",) * 3
    odd = post("/chat/completions", HI, router, headers={"X-Request-Id": "no good"})
    assert odd.json()["id"].startswith("chatcmpl-")


def test_ready_follows_the_pool_and_health_does_not():
    down = StaticPool("no decode worker answers")
    response = call(ScriptedRouter([]), "GET", "/ready", down)
    assert (response.status_code, response.json()["reason"]) == (503, "no decode worker answers")
    assert call(ScriptedRouter([]), "GET", "/ready").status_code == 200
    assert call(ScriptedRouter([]), "GET", "/health", down).status_code == 200


def test_metrics():
    stats = WorkerStats(name="decode-0", role="decode", blocks_total=8, blocks_free=5, blocks_in_use=3, num_steps=4)
    stats.num_draft_tokens, stats.num_accepted_tokens = 8, 2
    worker = router_pb2.WorkerStatus(address="h:1", state=router_pb2.WORKER_STATE_READY, stats=stats)

    async def run() -> str:
        router = ScriptedRouter(words(" one two"), num_queued=3)
        text = text_service(router)
        text.metrics.watch(router, lambda: [worker])
        transport = httpx.ASGITransport(build_app(text, StaticPool()))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            await client.post("/v1/completions", json={"prompt": "Hi"})
            return (await client.get("/metrics")).text

    lines = asyncio.run(run()).splitlines()
    model = 'model_name="smol"'
    for line in (
        f"kvferry_prompt_tokens_total{{{model}}} 1.0",
        f"kvferry_generation_tokens_total{{{model}}} 2.0",
        f'kvferry_request_success_total{{finished_reason="length",{model}}} 1.0',
        f"kvferry_time_to_first_token_seconds_count{{{model}}} 1.0",
        f"kvferry_inter_token_latency_seconds_count{{{model}}} 1.0",
        f"kvferry_request_time_per_output_token_seconds_count{{{model}}} 1.0",
        f"kvferry_e2e_request_latency_seconds_count{{{model}}} 1.0",
        f"kvferry_request_queue_time_seconds_sum{{{model}}} 0.5",
        f"kvferry_request_decode_time_seconds_sum{{{model}}} 0.125",
        "kvferry_num_requests_waiting 3.0",
        "kvferry_num_requests_running 0.0",
        'kvferry_worker_up{address="h:1",role="decode",worker="decode-0"} 1.0',
        'kvferry_worker_blocks{role="decode",state="in_use",worker="decode-0"} 3.0',
        'kvferry_worker_num_steps_total{role="decode",worker="decode-0"} 4.0',
        'kvferry_worker_draft_acceptance_rate{role="decode",worker="decode-0"} 0.25',
    ):
        assert line in lines, line
