"""C10: what failed is an error to the client, never a 200 with an odd finish_reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.router.openai_calls import HI, check_error, post
from tests.router.scripted import ScriptedRouter, words
from workers.errors import KVFerryError, UnavailableError
from workers.request import FinishReason

PATHS: dict[str, dict[str, Any]] = {
    "/completions": {"prompt": "Hi"},
    "/chat/completions": HI,
    "/responses": {"input": "Hi"},
}
# With the status of each, and a part of what is said.
FAILURES: dict[str, tuple[Callable[[str], ScriptedRouter], int, str]] = {
    "a worker's ERROR output": (
        lambda said: ScriptedRouter(words(said) or [[]], FinishReason.ERROR),
        500,
        "the request failed; try again",
    ),
    "a worker's ABORTED output": (
        lambda said: ScriptedRouter(words(said) or [[]], FinishReason.ABORTED),
        499,
        "was aborted on its worker; try again",
    ),
    "outputs that end without a reason": (lambda said: ScriptedRouter(words(said), None), 500, "try again"),
    "a lost worker": (lambda said: ScriptedRouter([*words(said), UnavailableError("p0 is gone")]), 503, "p0 is gone"),
    "an error of no type": (lambda said: ScriptedRouter([*words(said), KVFerryError("broken")]), 500, "broken"),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("said", ["", " one", " one two"])
def test_c10_a_whole_answer_that_failed_is_an_error(path: str, failure: str, said: str):
    failing, status, message = FAILURES[failure]
    error = check_error(post(path, PATHS[path], failing(said)), status, kind="server_error")
    assert message in error["message"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("failure", FAILURES)
def test_c10_a_stream_that_failed_before_its_first_piece_is_an_error(path: str, failure: str):
    failing, status, message = FAILURES[failure]
    error = check_error(post(path, PATHS[path] | {"stream": True}, failing("")), status, kind="server_error")
    assert message in error["message"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("failure", FAILURES)
def test_c10_a_stream_that_failed_later_ends_with_an_error_and_no_finish_reason(path: str, failure: str):
    failing, _, message = FAILURES[failure]
    response = post(path, PATHS[path] | {"stream": True}, failing(" one two"))
    lines = [line for line in response.text.split("\n") if line.startswith("data: ")]
    *pieces, last = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert message in (last.get("response") or last)["error"]["message"]
    assert "one" in response.text
    assert "[DONE]" not in response.text
    for piece in pieces:
        assert piece.get("type") not in ("response.completed", "response.incomplete")
        assert not any(choice["finish_reason"] for choice in piece.get("choices", ()))
