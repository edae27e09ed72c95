"""`strict: true` where the model chooses whether to call: text is free, a call that is begun follows its schema."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from router.openai.tool_syntax import tool_syntax
from router.openai.tools import read_tools
from tests.router.scripted import smollm
from tests.router.test_openai_tools import CALL, TIME, WEATHER, accepts, post, says
from workers.errors import InvalidRequestError

FUNCTION: dict[str, Any] = {**WEATHER["function"], "strict": True}
STRICT = {"type": "function", "function": FUNCTION}
LOOSE = '<tool_call>\n{"name": "time", "arguments": {"zone": [1]}}\n</tool_call>'


def grammar_of(body: dict[str, Any]) -> str:
    router = says("Just text.")
    response = post(body, router)
    assert response.status_code == 200, response.text
    grammar: str = router.calls[0][1].grammar
    return grammar


@pytest.mark.parametrize(("city", "follows"), [("Bern", True), ("Bernissimo", False), (5, False)])
def test_a_call_that_a_model_begins_is_held_to_its_strict_schema(city: Any, follows: bool):
    grammar = grammar_of({"tools": [STRICT, TIME]})
    assert grammar
    call = CALL.replace('"Bern"', json.dumps(city))
    for text in (call, f"I look.\n{call}", f"{LOOSE}\n{call} done"):
        assert accepts(grammar, text) is follows, text


@pytest.mark.parametrize("text", ["", "Just 1 < 2.", "<tool> and <tool_cal", LOOSE, f"Well: {LOOSE}{LOOSE}\n"])
def test_text_is_free_and_so_are_calls_of_other_functions(text: str):
    assert accepts(grammar_of({"tools": [STRICT, TIME]}), text)


@pytest.mark.parametrize("text", ["<tool_call>none", '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>'])
def test_what_is_begun_is_a_call_of_one_of_the_tools(text: str):
    assert not accepts(grammar_of({"tools": [STRICT, TIME]}), text)


def test_without_it_nothing_is_held():
    assert grammar_of({"tools": [WEATHER, TIME]}) == ""
    assert grammar_of({"tools": [STRICT, TIME], "tool_choice": "none"}) == ""
    only_time = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TIME]}}
    assert grammar_of({"tools": [STRICT, TIME], "tool_choice": only_time}) == ""
    use = read_tools([STRICT], "auto", None)
    assert use.grammar(tool_syntax("mistral", None)) == ""
    assert use.grammar(tool_syntax("hermes", None))


def test_responses_know_it_too():
    router = says("Just text.")
    tool = {"type": "function", **FUNCTION}
    assert post({"messages": None, "input": "Hi", "tools": [tool]}, router, "/v1/responses").status_code == 200
    assert accepts(router.calls[0][1].grammar, CALL)
    assert not accepts(router.calls[0][1].grammar, CALL.replace("Bern", "Bernissimo"))


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "not": {}},
        {"type": "object", "x-guidance": 5},
        {"type": "object", "x-guidance": {"nonsense": 1}},
        {"$ref": "#/nowhere"},
        {"type": "nothing"},
        {"enum": ["\ud800"]},
        {"const": float("nan")},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}},
    ],
)
def test_a_schema_that_cannot_be_held_is_refused_rather_than_forgotten(parameters: dict[str, Any]):
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": parameters}}
    with pytest.raises(InvalidRequestError) as caught:
        read_tools([tool], "auto", None).grammar(tool_syntax("hermes", None))
    assert caught.value.param == "tools"


def test_a_model_with_a_real_vocabulary_can_only_write_a_right_call():
    """Every token that may follow, over the vocabulary of a real model: from the mark to the value a call is forced."""
    tokenizer = smollm()
    matcher = LLMatcher(LLTokenizer(tokenizer.to_json(), n_vocab=49152), grammar_of({"tools": [STRICT]}))
    for token_id in tokenizer.encode("Let me see. <tool_call>", False):
        assert matcher.consume_token(token_id)
    text = tokenizer.decode(matcher.compute_ff_tokens())
    assert text.startswith('\n{"name": "weather", "arguments": {"city":')
