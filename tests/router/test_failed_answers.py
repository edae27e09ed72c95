"""A generation that fails is an error to the client, never an answer with an odd finish_reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.router.openai_calls import HI, check_error, post
from tests.router.scripted import ScriptedRouter, words
from workers.request import FinishReason

PATHS: dict[str, dict[str, Any]] = {
    "/completions": {"prompt": "Hi"},
    "/chat/completions": HI,
    "/responses": {"input": "Hi"},
}


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORTED])
@pytest.mark.parametrize("path", PATHS)
def test_a_failed_generation_is_no_answer(path: str, reason: FinishReason):
    status = {FinishReason.ERROR: 500, FinishReason.ABORTED: 499}[reason]
    for said, stream in (("one", False), ("one two", False), ("one", True)):
        response = post(path, PATHS[path] | {"stream": stream}, ScriptedRouter(words(said), reason))
        check_error(response, status, kind="server_error")


@pytest.mark.parametrize("path", PATHS)
def test_a_generation_that_fails_mid_stream_ends_with_an_error_and_no_finish_reason(path: str):
    router = ScriptedRouter(words("one two three"), FinishReason.ERROR)
    response = post(path, PATHS[path] | {"stream": True}, router)
    lines = [line for line in response.text.split("\n") if line.startswith("data: ")]
    *pieces, last = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert (last.get("response") or last)["error"]["message"] == "the request failed; try again"
    assert "one" in response.text
    for piece in pieces:
        assert piece.get("type") not in ("response.completed", "response.incomplete")
        assert not any(choice["finish_reason"] for choice in piece.get("choices", ()))
