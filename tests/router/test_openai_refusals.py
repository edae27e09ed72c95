"""What the HTTP API refuses, and in which words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.router.openai_calls import HI, call, check_error, post
from tests.router.scripted import ScriptedRouter, words

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
