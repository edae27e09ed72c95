"""/tokenize, /detokenize, /version, and what a stream tells of its usage."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.openai_calls import HI, call, check_error, events, post
from tests.router.scripted import ScriptedRouter, smollm, words


def ask(path: str, body: dict[str, Any]) -> Any:
    return call(ScriptedRouter([]), "POST", path, json=body)


def test_a_prompt_is_tokenised_as_it_would_be_computed():
    text = "Hello, wörld 🤗"
    body = ask("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    ids = smollm().encode(text)
    assert (body["tokens"], body["count"], body["max_model_len"]) == (ids, len(ids), 64)
    assert body["token_strs"][:2] == ["Hello", ","]
    assert ask("/tokenize", {"prompt": text}).json()["token_strs"] is None
    assert ask("/detokenize", {"tokens": ids, "model": "smol"}).json() == {"prompt": text}


def test_messages_are_tokenised_with_their_template():
    router = ScriptedRouter(words("x"))
    post("/chat/completions", HI, router)
    body = ask("/tokenize", HI).json()
    assert body["tokens"] == router.calls[0][0]
    without = ask("/tokenize", {**HI, "add_generation_prompt": False}).json()
    assert body["tokens"][: without["count"]] == without["tokens"]
    assert without["count"] < body["count"]
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert ask("/tokenize", {**HI, "tools": tools}).json()["count"] > body["count"]


def test_bad_bodies_name_what_is_wrong():
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
    ):
        content = repr(body).replace("'", '"')
        headers = {"content-type": "application/json"}
        check_error(call(ScriptedRouter([]), "POST", path, content=content, headers=headers), 400, param)
    error = check_error(ask("/tokenize", {"prompt": "x", "model": "other"}), 404, "model")
    assert error["code"] == "model_not_found"


def test_the_version_is_told():
    assert call(ScriptedRouter([]), "GET", "/version").json()["version"]


@pytest.mark.parametrize(("path", "body"), [("/completions", {"prompt": "Hi"}), ("/chat/completions", HI)])
def test_every_piece_tells_the_usage_so_far_where_it_is_asked_for(path: str, body: dict[str, Any]):
    options = {"include_usage": True, "continuous_usage_stats": True}
    sent = {**body, "n": 2, "stream": True, "stream_options": options}
    *pieces, last, _ = events(post(path, sent, ScriptedRouter(words(" one two three"))))
    for index in (0, 1):
        used = [piece["usage"] for piece in pieces if piece["choices"][0]["index"] == index]
        counted = [one["completion_tokens"] for one in used]
        assert counted[-3:] == [1, 2, 3]
        assert set(counted[:-3]) <= {0}
        prompt = last["usage"]["prompt_tokens"]
        assert all(one["prompt_tokens"] == prompt for one in used)
        assert all(one["total_tokens"] == prompt + count for one, count in zip(used, counted, strict=True))
    assert last["usage"]["completion_tokens"] == 6
