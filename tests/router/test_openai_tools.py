"""Tools over HTTP: what the model is shown, what its answer is held to, and what the client gets."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from llguidance import LLMatcher, LLTokenizer

from router.openai.app import build_app
from tests.router.openai_calls import HI, check_error, check_schema, events
from tests.router.scripted import ScriptedRouter, StaticPool, smollm, text_service, words
from tests.router.serving import serving
from tests.router.test_openai_server import client
from workers.config import ModelConfig
from workers.request import FinishReason

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"city": {"type": "string", "maxLength": 9}},
        },
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "weather"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TIME]}}


def post(body: dict[str, Any], router: ScriptedRouter, path: str = "/v1/chat/completions") -> httpx.Response:
    async def run() -> httpx.Response:
        app = build_app(text_service(router, 1024), StaticPool())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            return await http.post(path, json=HI | body)

    return asyncio.run(run())


def says(text: str, finish: FinishReason = FinishReason.STOP) -> ScriptedRouter:
    """Ends with EOS, which is no part of the text."""
    return ScriptedRouter([*words(text), [2]] if finish is FinishReason.STOP else words(text), finish)


def deep_tool(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"a": schema}
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message["tool_calls"]]


def test_an_answer_with_calls_has_openais_shape():
    router = says("I look." + CALL + CALL)
    body = post({"tools": [WEATHER]}, router).json()
    check_schema(body, "CreateChatCompletionResponse")
    [choice] = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I look."
    assert calls_of(choice["message"]) == [("weather", {"city": "Bern"})] * 2
    ids = [call["id"] for call in choice["message"]["tool_calls"]]
    assert all(one.startswith("call_") for one in ids)
    assert ids[0] != ids[1]
    assert router.calls[0][1].grammar == ""


def test_streamed_calls_are_those_of_the_whole_answer():
    *pieces, done = events(post({"tools": [WEATHER], "stream": True, "n": 2}, says("Hm." + CALL + CALL)))
    assert done == "[DONE]"
    for index in (0, 1):
        own = [piece["choices"][0] for piece in pieces if piece["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in own) == "Hm."
        assert [choice["finish_reason"] for choice in own[-2:]] == [None, "tool_calls"]
        calls: dict[int, dict[str, Any]] = {}
        for choice in own:
            for delta in choice["delta"].get("tool_calls", ()):
                if "id" in delta:
                    calls[delta["index"]] = delta
                else:
                    calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
        assert calls_of({"tool_calls": list(calls.values())}) == [("weather", {"city": "Bern"})] * 2
    for piece in pieces:
        check_schema(piece, "CreateChatCompletionStreamResponse")


def test_text_is_text_though_there_are_tools():
    for how in ({"tools": [WEATHER]}, {"tools": [WEATHER], "tool_choice": "none"}):
        message = post(how, says("Just 1 < 2.")).json()["choices"][0]
        assert (message["message"]["content"], message["finish_reason"]) == ("Just 1 < 2.", "stop")
        assert "tool_calls" not in message["message"]
    message = post({"tools": [WEATHER], "tool_choice": "none"}, says(CALL)).json()["choices"][0]["message"]
    assert message["content"] == CALL


def test_one_call_where_only_one_is_wanted():
    for stream in (False, True):
        response = post({"tools": [WEATHER], "parallel_tool_calls": False, "stream": stream}, says(CALL + CALL))
        assert response.text.count('"weather"') == 1


def test_a_call_that_the_length_cuts_is_no_call_that_was_made():
    choice = post({"tools": [WEATHER]}, says(CALL[:50], FinishReason.LENGTH)).json()["choices"][0]
    assert choice["finish_reason"] == "length"


def test_logprobs_are_those_of_all_tokens():
    router = says(CALL)
    *pieces, _ = events(post({"tools": [WEATHER], "stream": True, "logprobs": True}, router))
    shown = [one for piece in pieces for one in (piece["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert "".join(bytes(one["bytes"]).decode() for one in shown).startswith(CALL)


def accepts(grammar: str, text: str) -> bool:
    matcher = LLMatcher(LLTokenizer("byte"), grammar)
    return matcher.consume_tokens(list(text.encode())) and bool(matcher.is_accepting())


@pytest.mark.parametrize(
    ("choice", "allowed"),
    [
        ("required", {"weather", "time", "both"}),
        (NAMED, {"weather"}),
        (ALLOWED, {"time"}),
    ],
)
def test_an_answer_that_must_be_calls_is_held_to_their_schema(choice: Any, allowed: set[str]):
    answers = {
        "weather": '[{"name": "weather", "parameters": {"city": "Bern"}}]',
        "time": '[{"name": "time", "parameters": {}}]',
        "both": '[{"name": "time", "parameters": {}}, {"name": "weather", "parameters": {"city": "Bern"}}]',
        "other": '[{"name": "other", "parameters": {}}]',
        "too long": '[{"name": "weather", "parameters": {"city": "Bernissimo"}}]',
        "none": "[]",
        "text": "Hello",
    }
    router = says(answers[min(allowed)])
    body = post({"tools": [WEATHER, TIME], "tool_choice": choice}, router).json()
    grammar = router.calls[0][1].grammar
    for name, answer in answers.items():
        assert accepts(grammar, answer) == (name in allowed), name
    message = body["choices"][0]["message"]
    assert message["content"] is None
    assert [name for name, _ in calls_of(message)] == ([min(allowed)] if "both" not in allowed else ["time", "weather"])
    single = says(answers["time"])
    post({"tools": [WEATHER, TIME], "tool_choice": "required", "parallel_tool_calls": False}, single)
    assert not accepts(single.calls[0][1].grammar, answers["both"])


def prompt_of(body: dict[str, Any]) -> str:
    router = says("x")
    response = post(body, router)
    assert response.status_code == 200, response.text
    return smollm().decode(router.calls[0][0], skip_special_tokens=False)


def test_a_template_that_knows_no_tools_gets_them_spelled_out():
    shown = prompt_of({"tools": [WEATHER]})
    assert shown.startswith("<|im_start|>system\nYou may call functions")
    assert json.dumps(WEATHER) in shown
    system = {"role": "system", "content": "Be kind."}
    shown = prompt_of({"tools": [WEATHER], "messages": [system, *HI["messages"]]})
    assert shown.startswith("<|im_start|>system\nBe kind.\n\nYou may call functions")
    for how in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        assert "weather" not in prompt_of(how)


def test_calls_and_their_answers_go_back_to_the_model():
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    messages = [
        *HI["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "rain"}]},
    ]
    shown = prompt_of({"messages": messages, "tools": [WEATHER]})
    assert f"<|im_start|>assistant\n{CALL}<|im_end|>\n<|im_start|>tool\nrain<|im_end|>" in shown


def test_a_developer_is_the_system_to_templates_that_know_none():
    shown = prompt_of({"messages": [{"role": "developer", "content": "Be kind."}, *HI["messages"]]})
    assert shown.startswith("<|im_start|>system\nBe kind.<|im_end|>")


def test_the_last_message_can_be_continued():
    messages = [*HI["messages"], {"role": "assistant", "content": "It is"}]
    shown = prompt_of({"messages": messages, "continue_final_message": True})
    assert shown.endswith("<|im_start|>assistant\nIt is")


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"tools": 5}, "tools", "a list of at most 128"),
        ({"tools": [{"type": "function"}]}, "tools", "tools[0] must be"),
        ({"tools": [{"type": "web_search"}]}, "tools", "only functions are supported"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "up to 64 letters"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 5}}]}, "tools", "JSON Schema"),
        ({"tools": [deep_tool(101)], "tool_choice": "required"}, "tools", "nested over 100 deep"),
        ({"tools": [TIME, TIME]}, "tools", "a second time"),
        ({"tools": [TIME], "tool_choice": "always"}, "tool_choice", "must be"),
        ({"tools": [TIME], "tool_choice": NAMED}, "tool_choice", "names 'weather'"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [TIME], "response_format": {"type": "json_object"}}, "tools", "do not go with"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}],
                "tool_choice": "required",
            },
            "tools",
            "x",
        ),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages", "tool_calls is not for"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages", "tool_call_id is not for"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "tool_call_id is missing"),
        ({"messages": [{"role": "assistant", "tool_calls": [5]}]}, "messages", "messages[0].tool_calls[0] must be"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{"}}],
                    }
                ]
            },
            "messages",
            "arguments is not valid JSON",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages",
            'messages[0].content[0] is a part of type "image_url"; only text is supported',
        ),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "is not free"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "does not go with",
        ),
    ],
)
def test_what_cannot_be_followed_names_its_parameter(body: dict[str, Any], param: str, message: str):
    router = says("never")
    error = check_error(post(body, router), 400, param)
    assert message in error["message"]
    assert not router.calls


def test_a_model_whose_form_is_not_known_is_asked_by_schema_only():
    async def run() -> tuple[httpx.Response, httpx.Response]:
        text = text_service(says('[{"name": "time", "parameters": {}}]'), 1024)
        app = build_app(text, StaticPool())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            return (
                await http.post("/v1/chat/completions", json=HI | {"tools": [TIME]}),
                await http.post("/v1/chat/completions", json=HI | {"tools": [TIME], "tool_choice": "required"}),
            )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("router.openai.app.tool_syntax", lambda *_: None)
        auto, required = asyncio.run(run())
    assert "set router.tool_call_parser" in check_error(auto, 400, "tool_choice")["message"]
    assert required.json()["choices"][0]["finish_reason"] == "tool_calls"


def test_openais_client_gets_streamed_calls():
    async def run() -> None:
        model = ModelConfig(served_model_name=("smol",), max_model_len=512)
        async with serving(says(CALL), model) as server, client(server.http_port) as api:
            tools: Any = [WEATHER]
            async with api.chat.completions.stream(
                model="smol", messages=[{"role": "user", "content": "Hi"}], tools=tools
            ) as stream:
                final = await stream.get_final_completion()
        [call] = final.choices[0].message.tool_calls or []
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Bern"})

    asyncio.run(run())
