"""`n` and `best_of` of the HTTP API, over an ASGI transport and through OpenAI's own client."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from tests.router.openai_calls import HI, check_error, check_schema, events, post, usage_of
from tests.router.scripted import HANG, ScriptedRouter, words
from tests.router.serving import serving

USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def two_answers(**settings: Any) -> ScriptedRouter:
    return ScriptedRouter(words(" one two"), others=[words(" three four five")], **settings)


def test_n_answers_are_n_choices_and_their_prompt_counts_once():
    body = post("/completions", {"prompt": "Hi", "n": 2}, two_answers(num_cached_tokens=1)).json()
    check_schema(body, "CreateCompletionResponse")
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (0, " one two"),
        (1, " three four five"),
    ]
    assert body["usage"] == usage_of(1, 5, 1)
    chat = post("/chat/completions", {**HI, "n": 2, "temperature": 0}, two_answers()).json()
    check_schema(chat, "CreateChatCompletionResponse")
    assert [choice["message"]["content"] for choice in chat["choices"]] == [" one two", " three four five"]
    assert chat["usage"]["completion_tokens"] == 5


def test_choices_are_counted_on_from_prompt_to_prompt():
    router = two_answers()
    body = post("/completions", {"prompt": ["Hi", "Hello there"], "n": 2, "echo": True}, router).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in body["choices"]] == [
        "Hi one two", "Hi three four five", "Hello there one two", "Hello there three four five",
    ]  # fmt: skip
    assert body["usage"] == usage_of(1 + 2, 10)
    # One request for each prompt: its choices share the prompt's KV.
    assert [params.n for _, params, _ in router.calls] == [2, 2]


@pytest.mark.parametrize(
    ("path", "body"), [("/completions", {"prompt": ["Hi", "Hello there"]}), ("/chat/completions", HI)]
)
def test_streamed_pieces_carry_the_index_of_their_choice(path: str, body: dict[str, Any]):
    *pieces, usage, done = events(post(path, {**body, "n": 2, **USAGE}, two_answers()))
    num_prompts = len(body.get("prompt", [1]))
    texts = [""] * 2 * num_prompts
    reasons: list[tuple[int, str]] = []
    for piece in pieces:
        [choice] = piece["choices"]
        texts[choice["index"]] += choice["text"] if "text" in choice else choice["delta"]["content"]
        if choice["finish_reason"]:
            reasons.append((choice["index"], choice["finish_reason"]))
    assert texts == [" one two", " three four five"] * num_prompts
    assert sorted(reasons) == [(index, "length") for index in range(2 * num_prompts)]
    assert usage["usage"]["completion_tokens"] == 5 * num_prompts
    assert done == "[DONE]"


def test_a_stop_string_ends_its_own_choice_only_and_the_request_when_all_have_ended():
    router = ScriptedRouter([*words(" one two three four five"), HANG], others=[words(" a b c")])
    body = post("/completions", {"prompt": "Hi", "n": 2, "stop": "two"}, router).json()
    assert [(c["text"], c["finish_reason"]) for c in body["choices"]] == [(" one ", "stop"), (" a b c", "length")]
    assert body["usage"] == usage_of(1, 2 + 3)
    # The router would have gone on with the first.
    assert len(router.aborted) == 1


def test_logprobs_and_echoes_are_those_of_each_choice():
    body = {"prompt": "Hi there", "n": 2, "logprobs": 1, "echo": True}
    whole = post("/completions", body, two_answers()).json()["choices"]
    tokens = [choice["logprobs"]["tokens"] for choice in whole]
    assert tokens == [["Hi", " there", " one", " two"], ["Hi", " there", " three", " four", " five"]]
    *pieces, _ = events(post("/completions", {**body, "stream": True}, two_answers()))
    streamed: list[list[str]] = [[], []]
    for piece in pieces:
        streamed[piece["choices"][0]["index"]] += piece["choices"][0]["logprobs"]["tokens"]
    assert streamed == tokens
    only = post("/completions", {"prompt": "Hi there", "n": 2, "echo": True, "max_tokens": 0}, two_answers()).json()
    assert [choice["text"] for choice in only["choices"]] == ["Hi there", "Hi there"]
    assert only["usage"] == usage_of(2, 0)


def best_of_three() -> ScriptedRouter:
    """Logprobs are -id/1000. By the mean of a token the order is 1, 0, 2; by their sum it would be 0, 2, 1."""
    return ScriptedRouter([[300]], others=[[[200], [200], [200]], [[400]]])


def test_best_of_shows_the_likeliest_by_token_and_counts_all():
    texts = [
        post("/completions", {"prompt": "Hi"}, ScriptedRouter(s)).json()["choices"][0]["text"]
        for s in ([[300]], [[200]] * 3)
    ]
    router = best_of_three()
    body = post("/completions", {"prompt": "Hi", "best_of": 3}, router).json()
    [choice] = body["choices"]
    assert (choice["index"], choice["text"], choice["logprobs"]) == (0, texts[1], None)
    assert body["usage"] == usage_of(1, 5)
    [(_, params, _)] = router.calls
    assert (params.n, params.logprobs) == (3, 0)
    body = post("/completions", {"prompt": ["Hi", "Hi"], "n": 2, "best_of": 3, "logprobs": 0}, best_of_three()).json()
    assert [choice["text"] for choice in body["choices"]] == [texts[1], texts[0]] * 2
    assert [len(choice["logprobs"]["tokens"]) for choice in body["choices"]] == [3, 1, 3, 1]
    assert body["usage"] == usage_of(2, 10)


def test_best_of_n_changes_nothing():
    for how in ({}, {"stream": True}):
        router = two_answers()
        assert post("/completions", {"prompt": "Hi", "n": 2, "best_of": 2, **how}, router).status_code == 200
        assert router.calls[0][1].logprobs is None


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"n": 3, "best_of": 2}, "best_of", "best_of is 2; it must be n (3) to 128"),
        ({"best_of": 2, "stream": True}, "best_of", "best_of over n does not go with stream: true"),
        ({"prompt": ["Hi"] * 43, "n": 3}, "n", "43 prompts with 3 answers each are 129; at most 128: lower n"),
    ],
)
def test_what_does_not_go_together_is_refused(body: dict[str, Any], param: str, message: str):
    router = two_answers()
    error = check_error(post("/completions", {"prompt": "Hi", **body}, router), 400, param)
    assert message in error["message"]
    assert not router.calls


def test_chats_have_no_best_of():
    error = check_error(post("/chat/completions", {**HI, "best_of": 2}), 400, "best_of")
    assert error["message"] == "best_of: input should be 1, got 2"


def test_openais_client_gets_several_choices():
    async def run() -> None:
        async with (
            serving(two_answers()) as server,
            openai.AsyncOpenAI(
                base_url=f"http://127.0.0.1:{server.http_port}/v1", api_key="none", max_retries=0
            ) as api,
        ):
            whole = await api.completions.create(model="smol", prompt="Hi", n=2, best_of=2)
            assert [choice.text for choice in whole.choices] == [" one two", " three four five"]
            texts = {0: "", 1: ""}
            stream = await api.chat.completions.create(
                model="smol", messages=[{"role": "user", "content": "Hi"}], n=2, stream=True
            )
            async for piece in stream:
                texts[piece.choices[0].index] += piece.choices[0].delta.content or ""
            assert texts == {0: " one two", 1: " three four five"}

    asyncio.run(run())
