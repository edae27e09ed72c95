"""/v1/responses over a scripted router; OpenAI's own types say whether a body or an event is one."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from typing import Any

import httpx
import pytest
from openai.types.responses import Response as OpenAIResponse
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from router.openai.app import build_app
from tests.router.openai_calls import check_error
from tests.router.scripted import TIMELINE, ScriptedRouter, StaticPool, smollm, text_service, words
from tests.router.serving import serving
from tests.router.test_openai_server import client
from tests.router.test_openai_tools import CALL, says
from workers.errors import UnavailableError
from workers.request import FinishReason

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}, "strict": True}


def post(
    body: dict[str, Any], router: ScriptedRouter, path: str = "/v1/responses", headers: dict[str, str] | None = None
) -> httpx.Response:
    async def run() -> httpx.Response:
        app = build_app(text_service(router, 1024), StaticPool())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            return await http.post(path, json=body, headers=headers)

    return asyncio.run(run())


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Numbered from 0 without a gap, each named twice."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines.pop() == ""
    found = []
    for number, line in enumerate(lines):
        kind, data = line.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        assert event["sequence_number"] == number
        EVENTS.validate_python(event)
        found.append(event)
    return found


def prompt_of(body: dict[str, Any]) -> str:
    router = says("x")
    response = post(body, router)
    assert response.status_code == 200, response.text
    return smollm().decode(router.calls[0][0], skip_special_tokens=False)


def test_a_response_has_openais_shape():
    router = says("one two")
    sent = {"input": "Hi", "model": "smol", "temperature": 0.5, "top_p": 0.25, "max_output_tokens": 9, "user": "u"}
    body = post({**sent, "metadata": {"a": "b"}}, router).json()
    OpenAIResponse.model_validate(body)
    assert body["id"].startswith("resp_")
    assert (body["status"], body["store"], body["model"], body["metadata"]) == ("completed", False, "smol", {"a": "b"})
    [message] = body["output"]
    assert (message["role"], message["status"]) == ("assistant", "completed")
    assert message["content"] == [{"type": "output_text", "text": "one two", "annotations": [], "logprobs": []}]
    [(ids, params, _)] = router.calls
    assert (params.temperature, params.top_p, params.max_tokens) == (0.5, 0.25, 9)
    assert body["usage"]["input_tokens"] == len(ids)
    assert (body["usage"]["output_tokens"], body["usage"]["total_tokens"]) == (3, len(ids) + 3)


def test_a_response_that_the_length_cuts_is_incomplete():
    body = post({"input": "Hi"}, ScriptedRouter(words("one"))).json()
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][0]["status"] == "incomplete"
    *_, last = events(post({"input": "Hi", "stream": True}, ScriptedRouter(words("one"))))
    assert last["type"] == "response.incomplete"


def test_events_come_in_order_and_end_with_the_whole():
    found = events(post({"input": "Hi", "stream": True}, says("one two")))
    kinds = [event["type"].removeprefix("response.") for event in found]
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added",
        *["output_text.delta"] * kinds.count("output_text.delta"),
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert "".join(event["delta"] for event in found if "delta" in event) == "one two"
    assert found[0]["response"]["output"] == []
    assert found[2]["item"]["content"] == []
    whole = found[-1]["response"]
    OpenAIResponse.model_validate(whole)
    assert whole["output"][0]["content"][0]["text"] == "one two"
    plain = post({"input": "Hi"}, says("one two")).json()
    assert plain["usage"] == whole["usage"]


def test_calls_are_items_of_their_own():
    router = says("I look." + CALL + CALL)
    found = events(post({"input": "Hi", "tools": [WEATHER], "stream": True}, router))
    *_, last = found
    message, first, second = last["response"]["output"]
    assert message["content"][0]["text"] == "I look."
    for call in (first, second):
        assert (call["type"], call["name"], call["status"]) == ("function_call", "weather", "completed")
        assert json.loads(call["arguments"]) == {"city": "Bern"}
    assert first["call_id"] != second["call_id"]
    deltas = [e["delta"] for e in found if e["type"].endswith("arguments.delta") and e["output_index"] == 1]
    assert "".join(deltas) == first["arguments"]
    assert last["response"]["tools"][0]["name"] == "weather"
    body = post({"input": "Hi", "tools": [WEATHER]}, says(CALL)).json()
    OpenAIResponse.model_validate(body)
    assert [item["type"] for item in body["output"]] == ["function_call"]


def test_a_call_that_must_be_is_held_to_its_schema():
    router = says('[{"name": "weather", "parameters": {}}]')
    choice = {"type": "function", "name": "weather"}
    body = post({"input": "Hi", "tools": [WEATHER], "tool_choice": choice}, router).json()
    OpenAIResponse.model_validate(body)
    assert router.calls[0][1].grammar
    assert [item["name"] for item in body["output"]] == ["weather"]


def test_items_are_the_messages_that_they_were():
    items = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Rain?"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "content": [{"type": "output_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Bern"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "yes"},
    ]
    shown = prompt_of({"input": items})
    assert shown == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nRain?<|im_end|>\n"
        f"<|im_start|>assistant\nHm.\n{CALL}<|im_end|>\n<|im_start|>tool\nyes<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt_of({"input": "Hi", "instructions": "Be brief."}).startswith("<|im_start|>system\nBe brief.<|im_end|>")


def test_text_format_holds_the_answer():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for form in ({"type": "json_object"}, {"type": "json_schema", "name": "it", "schema": schema}):
        router = says("{}")
        body = post({"input": "Hi", "text": {"format": form}}, router).json()
        assert router.calls[0][1].grammar
        assert body["text"]["format"] == form


def test_logprobs_where_they_are_included():
    include = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    body = post({"input": "Hi", **include}, says("one two")).json()
    OpenAIResponse.model_validate(body)
    shown = body["output"][0]["content"][0]["logprobs"]
    assert [one["token"] for one in shown][:2] == ["one", " two"]
    assert all(len(one["top_logprobs"]) == 2 for one in shown)
    found = events(post({"input": "Hi", "stream": True, **include}, says("one two")))
    streamed = [one for e in found if e["type"] == "response.output_text.delta" for one in e["logprobs"]]
    assert streamed == shown[: len(streamed)]
    assert len(streamed) >= 2


def test_input_tokens_are_counted_without_an_answer():
    router = says("never")
    count = post({"input": "Hi"}, router, "/v1/responses/input_tokens").json()
    assert not router.calls
    asked = says("x")
    post({"input": "Hi"}, asked)
    assert count == {"object": "response.input_tokens", "input_tokens": len(asked.calls[0][0])}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": [5]}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"role": 5, "content": "x"}]}, "input"),
        ({"input": [{"type": "function_call", "call_id": 1, "name": "f", "arguments": "{"}]}, "input"),
        ({"input": "x", "store": True}, "store"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "conversation": "c"}, "conversation"),
        ({"input": "x", "truncation": "auto"}, "truncation"),
        ({"input": "x", "reasoning": {"effort": "high"}}, "reasoning"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "text"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "max_tokens": 5}, "max_tokens"),
        ({"input": "x", "n": 2}, "n"),
        ({"input": "x", "top_logprobs": 21, "include": []}, "top_logprobs"),
    ],
)
def test_what_cannot_be_followed_names_its_parameter(body: dict[str, Any], param: str):
    router = says("never")
    check_error(post(body, router), 400, param)
    assert not router.calls


def test_what_changes_nothing_is_accepted():
    harmless = {
        "store": False, "truncation": "disabled", "background": False, "service_tier": "auto", "reasoning": None,
        "include": ["reasoning.encrypted_content"], "previous_response_id": None, "prompt_cache_key": "k", "tools": [],
        "text": {"format": {"type": "text"}, "verbosity": "medium"}, "parallel_tool_calls": True, "tool_choice": "auto",
    }  # fmt: skip
    body = post({"input": "Hi", **harmless}, says("x"))
    assert body.status_code == 200, body.text
    OpenAIResponse.model_validate(body.json())


def test_failures():
    died = UnavailableError("decode-0 died")
    for stream in (False, True):
        check_error(post({"input": "Hi", "stream": stream}, ScriptedRouter([died])), 503, kind="server_error")
    *_, last = events(post({"input": "Hi", "stream": True}, ScriptedRouter([*words("one two"), died])))
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "server_error", "message": "decode-0 died"}


def test_openais_client_streams_a_response():
    async def run() -> None:
        async with serving(ScriptedRouter(words("one two"), FinishReason.STOP)) as server:
            async with client(server.http_port) as api, api.responses.stream(model="smol", input="Hi") as stream:
                final = await stream.get_final_response()
            assert final.output_text == "one"

    asyncio.run(run())


def test_where_the_time_went_comes_with_the_header_only():
    asked = {"input": "Hi"}
    shown = {"timeline": asdict(TIMELINE)}
    headers = {"x-kvferry-timeline": "1"}
    assert post(asked, says("Hi"), headers=headers).json()["kvferry"] == shown
    assert "kvferry" not in post(asked, says("Hi")).json()
    *others, last = events(post({**asked, "stream": True}, says("Hi"), headers=headers))
    assert last["response"]["kvferry"] == shown
    assert "kvferry" not in json.dumps(others)
