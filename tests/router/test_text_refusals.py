"""What is refused before it reaches the router, and how that is said."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest

from router.text import Prompt
from tests.router.scripted import ScriptedRouter, text_service, words
from tests.router.test_text import GREEDY, answer
from workers.errors import InvalidRequestError
from workers.request import SamplingParams


def refusal(prompt: Prompt = "Hi", params: SamplingParams = GREEDY, **how: Any) -> InvalidRequestError:
    """The error of a request that must not reach the router."""
    router = ScriptedRouter(words("never"))
    with pytest.raises(InvalidRequestError) as raised:
        answer(text_service(router), prompt, params, **how)
    assert not router.calls
    assert "\n" not in raised.value.message
    return raised.value


def test_prompts_that_cannot_be_served_are_refused():
    assert (refusal("").param, refusal([]).message) == ("prompt", "prompt is empty; give at least one token")
    assert refusal([1, 49152]).message == "prompt[1] is token id 49152; the model's ids are 0 to 49151"
    assert refusal([-1]).param == "prompt"
    for long in (" a" * 64, [5] * 64, "a" * 10_000, [{"role": "user", "content": " a" * 80}]):
        error = refusal(long)
        assert error.code == "context_length_exceeded"
        assert error.message.startswith("This model's maximum context length is 64 tokens; ")
    assert refusal([{"role": "user", "content": " a" * 80}]).param == "messages"
    assert refusal([{"role": "oracle", "content": "?"}]).message.startswith("messages[0].role is 'oracle'; supported:")
    assert refusal([{"role": "user", "content": "\ud800"}]).param == "messages"


def test_a_prompt_and_its_answer_must_fit_together():
    router = ScriptedRouter(words("x"))
    answer(text_service(router), [5] * 60, replace(GREEDY, max_tokens=4))
    assert router.calls[0][1].max_tokens == 4
    error = refusal([5] * 60, replace(GREEDY, max_tokens=5))
    assert (error.code, error.param) == ("context_length_exceeded", "prompt")
    assert "lower max_tokens to 4" in error.message


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.1, math.nan, math.inf]),
        ("top_p", [0.0, -1.0, 1.1, math.nan]),
        ("top_k", [-2, 2**31]),
        ("max_tokens", [0, -5]),
        ("seed", [2**64, -(2**63) - 1]),
        ("stop_token_ids", [(49152,), (-1,)]),
        ("min_p", [-0.1, 1.1, math.nan]),
        ("repetition_penalty", [0.0, -1.0, math.inf, math.nan]),
        ("presence_penalty", [-2.1, 2.1, math.nan]),
        ("frequency_penalty", [-2.1, 2.1, math.inf]),
        ("logit_bias", [((49152, 1.0),), ((-1, 1.0),), ((5, 100.5),), ((5, -math.inf),), ((5, math.nan),)]),
        ("min_tokens", [-1, 64, 2**40]),
        ("logprobs", [-1, 21]),
        ("prompt_logprobs", [-1, 21]),
        ("n", [-1, 0, 129]),
    ],
)
def test_sampling_params_out_of_range_are_refused(field: str, values: list[Any]):
    for value in values:
        assert refusal(params=replace(GREEDY, **{field: value})).param == field


def test_the_ends_of_the_ranges_are_allowed():
    for changes in (
        {"min_p": 1.0, "repetition_penalty": 1e-9, "presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"min_p": 0.0, "repetition_penalty": 100.0, "presence_penalty": 2.0, "frequency_penalty": -2.0},
        {"logit_bias": ((0, -100.0), (49151, 100.0)), "min_tokens": 5, "max_tokens": 5},
        {"logprobs": 0, "prompt_logprobs": 20, "min_tokens": 63, "n": 128},
    ):
        router = ScriptedRouter(words("x"))
        answer(text_service(router), params=replace(GREEDY, **changes))
        assert [getattr(router.calls[0][1], name) for name in changes] == list(changes.values())


def test_refusals_say_what_is_allowed():
    assert refusal(params=replace(GREEDY, min_tokens=6, max_tokens=5)).message == (
        "min_tokens is 6; it must be 0 to max_tokens (5)"
    )
    assert refusal(params=replace(GREEDY, logit_bias=((5, 101.0),))).message == (
        "logit_bias is 101.0 for token 5; it must be -100 to 100"
    )
    assert refusal(params=replace(GREEDY, presence_penalty=3.0)).message == (
        "presence_penalty is 3.0; it must be -2 to 2 (0 changes nothing)"
    )
    assert refusal(cache_salt="\ud800").param == refusal(cache_salt="x" * 513).param == "cache_salt"


def test_stops_and_request_ids_are_checked():
    assert refusal(stops=["a"] * 5).param == refusal(stops=[""]).param == "stop"
    text = text_service(ScriptedRouter(words("x")))

    async def prepare(request_id: str) -> None:
        text.prepare("Hi", GREEDY, request_id)

    for request_id in ("", "a b", "é", "x" * 129):
        with pytest.raises(InvalidRequestError, match="visible ASCII"):
            asyncio.run(prepare(request_id))
