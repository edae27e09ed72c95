"""A model that was never taught tools calls them, by OpenAI's own client, through a hand-off."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest

from tests.e2e.clusters import Running

pytestmark = pytest.mark.ray

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Oslo", "Lima"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FORECAST = {"name": "forecast", "description": "The weather of the next days.", "parameters": SCHEMA}
QUESTION = "What will the weather be like in Oslo for the next 3 days?"


def client(running: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.http}/v1", api_key="none", max_retries=0)


def test_a_call_that_must_be_follows_its_schema_whole_and_streamed(one_p_one_d: Running):
    asked: Any = {
        "model": "SmolLM2-135M-Instruct",
        "messages": [{"role": "user", "content": QUESTION}],
        "tools": [{"type": "function", "function": FORECAST}, {"type": "function", "function": {"name": "nothing"}}],
        "tool_choice": {"type": "function", "function": {"name": "forecast"}},
        "temperature": 0,
        "max_tokens": 60,
    }
    with client(one_p_one_d) as api:
        [choice] = api.chat.completions.create(**asked).choices
        with api.chat.completions.stream(**asked) as stream:
            streamed = stream.get_final_completion().choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    [call] = choice.message.tool_calls or []
    [again] = streamed.message.tool_calls or []
    assert (call.function.name, call.function.arguments) == (again.function.name, again.function.arguments)
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)


def test_a_response_calls_the_same_function(one_p_one_d: Running):
    asked: Any = {
        "model": "SmolLM2-135M-Instruct",
        "input": QUESTION,
        "tools": [{"type": "function", **FORECAST}],
        "tool_choice": "required",
        "temperature": 0,
        "max_output_tokens": 60,
        "parallel_tool_calls": False,
    }
    with client(one_p_one_d) as api:
        whole = api.responses.create(**asked)
        with api.responses.stream(**asked) as stream:
            streamed = stream.get_final_response()
    [call], [again] = whole.output, streamed.output
    assert call.type == again.type == "function_call"
    assert call.arguments == again.arguments
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
