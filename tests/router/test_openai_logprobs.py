"""logprobs, prompt_logprobs and echo in OpenAI's shapes, over a scripted router."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.router.openai_calls import HI, check_error, check_schema, events, post, usage_of
from tests.router.scripted import HANG, ScriptedRouter, scores_of, smollm, words

SAID = " one two 🤗!"
IDS = smollm().encode(SAID)


def router() -> ScriptedRouter:
    return ScriptedRouter([[token_id] for token_id in IDS])


def joined(pieces: list[Any], key: str) -> list[Any]:
    """One list of a streamed answer's logprobs."""
    shown = [piece["choices"][0]["logprobs"] for piece in pieces if piece["choices"]]
    return [value for logprobs in shown if logprobs for value in logprobs[key]]


def text_of(token_id: int) -> str:
    return smollm().token_bytes(token_id).decode("utf-8", "replace")


def name_of(token_id: int) -> str:
    data = smollm().token_bytes(token_id)
    return text_of(token_id) if "\ufffd" not in text_of(token_id) else "bytes:" + repr(data)[2:-1]


@pytest.mark.parametrize("num_top", [0, 1, 3])
def test_completions_show_four_lists(num_top: int):
    body = post("/completions", {"prompt": "Hi", "logprobs": num_top}, router()).json()
    check_schema(body, "CreateCompletionResponse")
    [choice] = body["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [name_of(one) for one in IDS]
    assert logprobs["token_logprobs"] == [scores_of(one, 0).logprob for one in IDS]
    # The likeliest ones, and the token itself where it is none of them.
    assert [len(top) for top in logprobs["top_logprobs"]] == [{0: 1, 1: 2, 3: 3}[num_top]] * len(IDS)
    for one, top in zip(IDS, logprobs["top_logprobs"], strict=True):
        assert top[name_of(one)] == scores_of(one, 0).logprob
    offsets = logprobs["text_offset"]
    assert choice["text"] == SAID
    # Where the token's text begins; of an emoji's parts that is where their whole will.
    assert offsets == sorted(offsets)
    whole = [(token, at) for token, at in zip(logprobs["tokens"], offsets, strict=True) if "bytes:" not in token]
    assert 2 < len(whole) < len(IDS)
    assert all(SAID[at:].startswith(token) for token, at in whole)


def test_chats_show_an_object_for_each_token():
    body = post("/chat/completions", {**HI, "logprobs": True, "top_logprobs": 2}, router()).json()
    check_schema(body, "CreateChatCompletionResponse")
    content = body["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(one["bytes"]) for one in content).decode() == SAID
    for token_id, one in zip(IDS, content, strict=True):
        scores = scores_of(token_id, 2)
        assert (one["token"], one["logprob"]) == (text_of(token_id), scores.logprob)
        assert [(top["token"], top["logprob"]) for top in one["top_logprobs"]] == [
            (text_of(top_id), logprob)
            for top_id, logprob in zip(scores.top_token_ids, scores.top_logprobs, strict=True)
        ]
    plain = post("/chat/completions", {**HI, "logprobs": True}, router()).json()
    assert [one["top_logprobs"] for one in plain["choices"][0]["logprobs"]["content"]] == [[]] * len(IDS)


def test_streamed_pieces_together_are_the_whole():
    # The second is a special token, of which the text shows nothing.
    for prompt in ("Hello there", [5]):
        body = {"prompt": prompt, "logprobs": 2, "echo": True}
        whole = post("/completions", body, router()).json()["choices"][0]["logprobs"]
        *pieces, _ = events(post("/completions", {**body, "stream": True}, router()))
        assert {key: joined(pieces, key) for key in whole} == whole
    chat = {**HI, "logprobs": True, "top_logprobs": 1}
    content = post("/chat/completions", chat, router()).json()["choices"][0]["logprobs"]["content"]
    *pieces, _ = events(post("/chat/completions", {**chat, "stream": True}, router()))
    for piece in pieces:
        check_schema(piece, "CreateChatCompletionStreamResponse")
    assert joined(pieces, "content") == content


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_scores_prompts_as_evaluation_harnesses_ask_for_it(max_tokens: int, stream: bool):
    prompts = [smollm().encode("The sea is blue"), smollm().encode("Ferries carry cars"), IDS[:1]]
    script = ScriptedRouter([IDS[:1]])
    body = {"prompt": prompts, "echo": True, "max_tokens": max_tokens, "logprobs": 1, "temperature": 0, "seed": 1234}
    response = post("/completions", {**body, "stream": stream}, script)
    pieces = events(response)[:-1] if stream else [response.json()]
    assert {params.max_tokens for _, params, _ in script.calls} == {1}
    said = IDS[:max_tokens]
    for index, prompt in enumerate(prompts):
        own = [choice for piece in pieces for choice in piece["choices"] if choice["index"] == index]
        shown = [choice["logprobs"] for choice in own if choice["logprobs"]]
        lists = {key: list(itertools.chain(*(one[key] for one in shown))) for key in shown[0]}
        assert "".join(choice["text"] for choice in own) == smollm().decode([*prompt, *said])
        assert own[-1]["finish_reason"] == "length"
        assert lists["tokens"] == [text_of(one) for one in [*prompt, *said]]
        assert lists["token_logprobs"] == [None, *(scores_of(one, 0).logprob for one in [*prompt[1:], *said])]
        assert lists["top_logprobs"][0] is None
        assert all(len(top) == 2 for top in lists["top_logprobs"][1:])
        assert lists["text_offset"] == list(
            itertools.accumulate((len(text_of(one)) for one in [*prompt, *said][:-1]), initial=0)
        )
    if not stream:
        num_prompt_tokens = sum(map(len, prompts))
        assert pieces[0]["usage"] == usage_of(num_prompt_tokens, 3 * max_tokens)


def test_offsets_after_an_echo_count_its_special_tokens_as_they_were_given():
    for skip in (True, False):
        body = {"prompt": "<|im_start|>Hi", "echo": True, "logprobs": 0, "skip_special_tokens": skip}
        choice = post("/completions", body, router()).json()["choices"][0]
        offsets, tokens = choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"]
        assert choice["text"] == "<|im_start|>Hi" + SAID
        assert tokens[:3] == ["<|im_start|>", "Hi", " one"]
        assert [choice["text"][at:].startswith(token) for at, token in zip(offsets[:4], tokens[:4], strict=True)] == [
            True
        ] * 4


def test_logprobs_stop_where_the_answer_does():
    script = ScriptedRouter([*words(" one two three"), HANG])
    choice = post("/completions", {"prompt": "Hi", "stop": "two", "logprobs": 0}, script).json()["choices"][0]
    assert choice["logprobs"]["tokens"] == [" one", " two"]


def test_prompt_logprobs_are_by_token_id():
    prompt = smollm().encode("Hello there, friend")
    completion = post("/completions", {"prompt": prompt, "prompt_logprobs": 1}, router()).json()
    chat = post("/chat/completions", {**HI, "prompt_logprobs": 0}, router()).json()
    assert completion["choices"][0]["logprobs"] is None
    first, *others = completion["choices"][0]["prompt_logprobs"]
    assert first is None
    for token_id, one in zip(prompt[1:], others, strict=True):
        scores = scores_of(token_id, 1)
        assert one == {
            str(token_id + 1): {"logprob": scores.top_logprobs[0], "rank": 1, "decoded_token": text_of(token_id + 1)},
            str(token_id): {"logprob": scores.logprob, "rank": 2, "decoded_token": text_of(token_id)},
        }
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert all(len(one) == 1 for one in chat["prompt_logprobs"][1:])
    plain = post("/completions", {"prompt": prompt}, router()).json()
    assert "prompt_logprobs" not in plain["choices"][0]


def test_cached_tokens_are_in_usage():
    script = ScriptedRouter([IDS], num_cached_tokens=2)
    body = post("/completions", {"prompt": [[5, 6, 7], [5, 6, 8]], "max_tokens": 9}, script).json()
    assert body["usage"] == usage_of(6, 2 * len(IDS), 4)
    stream = {**HI, "stream": True, "stream_options": {"include_usage": True}}
    *_, usage, _ = events(post("/chat/completions", stream, ScriptedRouter([IDS], num_cached_tokens=2)))
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


def test_what_does_not_go_together_is_refused_with_the_mend():
    for top in (1, 5):
        error = check_error(post("/chat/completions", {**HI, "top_logprobs": top}), 400, "top_logprobs")
        assert error["message"] == "top_logprobs needs logprobs: true; set it, or leave top_logprobs out"
    many = check_error(post("/chat/completions", {**HI, "logprobs": True, "top_logprobs": 21}), 400, "top_logprobs")
    assert many["message"] == "top_logprobs is 21; it must be 0 to 20"
    for path, body in (("/completions", {"prompt": "Hi"}), ("/chat/completions", HI)):
        check_error(post(path, {**body, "prompt_logprobs": 1, "stream": True}), 400, "prompt_logprobs")
    check_error(post("/chat/completions", {**HI, "logprobs": 1}), 400, "logprobs")
    check_error(post("/completions", {"prompt": "Hi", "logprobs": True}), 400, "logprobs")
