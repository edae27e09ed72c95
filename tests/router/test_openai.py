"""The HTTP API's shapes, over an ASGI transport."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from protos import router_pb2
from protos.worker_pb2 import WorkerStats
from router.openai.app import build_app
from tests.router.scripted import HANG, ScriptedRouter, StaticPool, smollm, text_service, words
from workers.errors import OverloadedError, UnavailableError
from workers.request import FinishReason

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


UNSUPPORTED: dict[str, Any] = {
    "functions": [{"name": "f"}],
    "suffix": "x",
    "audio": {"voice": "x"},
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_parameters_are_named(name: str):
    for path, body in (("/completions", {"prompt": "Hi"}), ("/chat/completions", HI)):
        error = check_error(post(path, {**body, name: UNSUPPORTED[name]}), 400, name)
        assert "is not supported; leave it out" in error["message"]


BAD_FIELDS: list[tuple[str, Any]] = [
    ("temperature", "hot"),
    ("temperature", True),
    ("temperature", -1),
    ("top_p", 0),
    ("top_k", 1.5),
    ("max_tokens", "5"),
    ("max_tokens", 0),
    ("seed", 2**70),
    ("stop", 5),
    ("stop", ["a"] * 5),
    ("stop", [""]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["x"]),
    ("min_p", 1.5),
    ("repetition_penalty", 0),
    ("presence_penalty", 2.5),
    ("frequency_penalty", "x"),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"49152": 1}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"5": "1"}),
    ("logit_bias", [5]),
    ("min_tokens", 100),
    ("prompt_logprobs", 21),
    ("logprobs", 21),
    ("n", 0),
    ("n", 129),
    ("n", 1.5),
    ("best_of", 0),
    ("best_of", 129),
    ("include_stop_str_in_output", 1),
    ("skip_special_tokens", "no"),
    ("cache_salt", "\ud800"),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("model", 5),
]


@pytest.mark.parametrize(("name", "value"), BAD_FIELDS)
def test_bad_values_name_their_parameter(name: str, value: Any):
    for path, body in (("/completions", {"prompt": "Hi"}), ("/chat/completions", HI)):
        router = ScriptedRouter(words("never"))
        # Escaped: a lone surrogate has no UTF-8 form.
        content, headers = json.dumps({**body, name: value}), {"content-type": "application/json"}
        check_error(call(router, "POST", f"/v1{path}", content=content, headers=headers), 400, name)
        assert not router.calls


@pytest.mark.parametrize("prompt", [5, None, [], "", {}, [[]], [1, "a"], ["a", 1], [True], [[1], "a", []], [[49152]]])
def test_bad_prompts(prompt: Any):
    check_error(post("/completions", {"prompt": prompt}), 400, "prompt")


@pytest.mark.parametrize(
    "messages",
    [
        5,
        [],
        ["Hi"],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "tool", "content": "x"}],
        [{"content": "x"}],
    ],
)
def test_bad_messages(messages: Any):
    check_error(post("/chat/completions", {"messages": messages}), 400, "messages")


def test_a_lone_surrogate_is_refused():
    body, headers = '{"prompt": "\\ud800"}', {"content-type": "application/json"}
    check_error(call(ScriptedRouter([]), "POST", "/v1/completions", content=body, headers=headers), 400, "prompt")


def test_a_missing_field_is_named():
    check_error(post("/chat/completions", {}), 400, "messages")
    check_error(post("/completions", {}), 400, "prompt")


def test_a_context_too_long_has_openais_code():
    for max_tokens in (5, 10**30):
        response = post("/completions", {"prompt": [5] * 60, "max_tokens": max_tokens})
        assert check_error(response, 400, "prompt")["code"] == "context_length_exceeded"


def test_one_bad_prompt_starts_none():
    router = ScriptedRouter(words("x"))
    check_error(post("/completions", {"prompt": ["Hi", ""]}, router), 400, "prompt")
    assert not router.calls


@pytest.mark.parametrize("content", ["{", "[1]", '"x"', "null", "", '{"prompt": NaN}', "[" * 100_000, b"\xff\xfe\xfd"])
def test_bodies_that_are_no_json_object(content: str | bytes):
    headers = {"content-type": "application/json"}
    check_error(call(ScriptedRouter([]), "POST", "/v1/completions", content=content, headers=headers), 400)


def test_a_wrong_content_type():
    error = check_error(call(ScriptedRouter([]), "POST", "/v1/completions", data={"prompt": "Hi"}), 400)
    assert "send application/json" in error["message"]


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
