"""What an answer must match: every way to say it, and what is refused."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from llguidance import LLMatcher

from protos import router_pb2, worker_pb2
from router.structured import MAX_GRAMMAR_CHARS, native_grammar
from tests.cluster.test_client_params import ask
from tests.router.openai_calls import HI, check_error, post
from tests.router.scripted import ScriptedRouter, words
from workers.errors import InvalidRequestError

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def grammar_sent(**fields: Any) -> str:
    router = ScriptedRouter(words("x"))
    response = post("/chat/completions", HI | fields, router)
    assert response.status_code == 200, response.text
    [(_, params, _)] = router.calls
    assert isinstance(params.grammar, str)
    return params.grammar


def response_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "strict": True, "schema": schema}}


def test_all_ways_to_say_it_give_the_same_grammar():
    by_schema = grammar_sent(response_format=response_format(SCHEMA))
    assert by_schema
    assert json.loads(by_schema)["grammars"][0]["json_schema"]["properties"] == SCHEMA["properties"]
    assert grammar_sent(structured_outputs={"json": SCHEMA}) == by_schema
    assert grammar_sent(guided_json=json.dumps(SCHEMA), structured_outputs=None) == by_schema
    any_object = grammar_sent(response_format={"type": "json_object"})
    assert any_object == grammar_sent(structured_outputs={"json_object": True}) != by_schema
    for kind, value in (("regex", "[0-9]+"), ("choice", ['"a"\n', "ö"]), ("grammar", 'start: "a" | "b"')):
        grammar = grammar_sent(structured_outputs={kind: value})
        assert grammar == grammar_sent(**{f"guided_{kind}": value})
        assert grammar
        router = ScriptedRouter(words("x"))
        ask(router, **{kind: value})
        assert router.calls[0][1].grammar == grammar
    router = ScriptedRouter(words("x"))
    for options in ({"json_schema": SCHEMA}, {"json_schema": json.dumps(SCHEMA)}, {"json_object": True}):
        ask(router, **options)
    assert [params.grammar for _, params, _ in router.calls] == [by_schema, by_schema, any_object]


def test_text_is_no_constraint():
    assert grammar_sent(response_format={"type": "text"}) == grammar_sent(guided_json=None) == ""
    assert native_grammar(router_pb2.GenerateRequest()) == ""


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": response_format({"type": "foo"})}, "response_format", "Invalid type: foo"),
        ({"response_format": response_format({"not": {}})}, "response_format", "Unimplemented keys"),
        (
            {"response_format": response_format({"not": {}, "x-guidance": {"lenient": True}})},
            "response_format",
            "Unimpl",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format", "must be"),
        ({"response_format": "json"}, "response_format", "must be"),
        ({"guided_json": "{"}, "guided_json", "no JSON Schema"),
        ({"guided_json": '{"items":' * 3000 + "{}" + "}" * 3000}, "guided_json", "recursion"),
        ({"guided_json": [1]}, "guided_json", "give an object"),
        ({"guided_regex": "a("}, "guided_regex", "unclosed group"),
        ({"guided_regex": "(" * 9000 + ")" * 9000}, "guided_regex", "cannot be followed"),
        ({"guided_regex": ""}, "guided_regex", "not an empty one"),
        ({"guided_choice": []}, "guided_choice", "at least one string"),
        ({"guided_choice": ["a", 1]}, "guided_choice", "give text"),
        ({"guided_grammar": "start: nope"}, "guided_grammar", "unknown name"),
        ({"guided_grammar": "start: <|im_end|>"}, "guided_grammar", "special_token"),
        ({"guided_grammar": "start: " + "(" * 9000}, "guided_grammar", "nested"),
        ({"structured_outputs": {"regex": "a" * MAX_GRAMMAR_CHARS}}, "structured_outputs.regex", "at most 65536"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs", "give one of"),
        ({"structured_outputs": {}}, "structured_outputs", "give one of"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "give one of"),
        ({"structured_outputs": "x"}, "structured_outputs", "must be an object"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format", "do not go together"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "EOS ends"),
    ],
)
def test_what_cannot_be_followed_is_refused_before_any_work(fields: dict[str, Any], param: str, message: str):
    router = ScriptedRouter(words("never"))
    error = check_error(post("/chat/completions", HI | fields, router), 400, param)
    assert message in error["message"]
    assert len(error["message"]) < 600
    assert not router.calls


def test_the_native_api_refuses_the_same():
    router = ScriptedRouter(words("never"))
    for options, param in (
        ({"regex": "a("}, "regex"),
        ({"json_schema": {"type": "foo"}}, "json_schema"),
        ({"regex": "a", "choice": ["b"]}, "choice"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            ask(router, **options)
        assert caught.value.param == param
    raw = router_pb2.GenerateRequest(params=worker_pb2.SamplingParams(grammar=LLMatcher.grammar_from_regex("a")))
    with pytest.raises(InvalidRequestError, match="set structured_output"):
        native_grammar(raw)
    assert not router.calls


def test_without_llguidance_the_mend_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    error = check_error(post("/completions", {"prompt": "Hi", "guided_regex": "a"}), 400, "guided_regex")
    assert "pip install 'kvferry[structured]'" in error["message"]
