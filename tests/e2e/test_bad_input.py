"""Bad input at each of the three doors of a real cluster: one clear line that says what is wrong, and no traceback."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from cluster.client import Client
from tests.e2e.clusters import Running
from workers.errors import InvalidRequestError, KVFerryError, NotFoundError

pytestmark = pytest.mark.ray

MAX_MODEL_LEN = 2048
VOCAB_SIZE = 49_152
TOO_LONG = [5] * MAX_MODEL_LEN


def require_one_clear_line(message: str, says: str) -> None:
    assert says in message
    assert message.strip() == message
    assert "\n" not in message
    assert len(message) < 400
    assert "Traceback" not in message


# A body of /v1/completions, then status, param, code, and what the message must say.
HTTP: dict[str, tuple[dict[str, Any], int, str | None, str | None, str]] = {
    "prompt too long": ({"prompt": TOO_LONG}, 400, "prompt", "context_length_exceeded", "2048 tokens"),
    "no room for max_tokens": (
        {"prompt": [5] * 2000, "max_tokens": 49},
        400,
        "prompt",
        "context_length_exceeded",
        "lower max_tokens to 48",
    ),
    "empty prompt": ({"prompt": ""}, 400, "prompt", None, "empty"),
    "no prompt": ({}, 400, "prompt", None, "prompt must be"),
    "temperature -1": ({"prompt": "Hi", "temperature": -1}, 400, "temperature", None, "temperature is -1"),
    "unknown model": ({"prompt": "Hi", "model": "gpt-9"}, 404, "model", "model_not_found", "'gpt-9' does not exist"),
    "max_tokens 0": ({"prompt": "Hi", "max_tokens": 0}, 400, "max_tokens", None, "max_tokens is 0"),
    "token id too large": ({"prompt": [5, VOCAB_SIZE]}, 400, "prompt", None, "0 to 49151"),
    "token id negative": ({"prompt": [-1]}, 400, "prompt", None, "prompt[0] is token id -1"),
    "max_tokens as text": ({"prompt": "Hi", "max_tokens": "5"}, 400, "max_tokens", None, 'got "5"'),
    "prompt as number": ({"prompt": 5}, 400, "prompt", None, "got 5"),
    "temperature as list": ({"prompt": "Hi", "temperature": [1]}, 400, "temperature", None, "got [1]"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", HTTP)
def test_http_refuses_in_openais_shape(one_p_one_d: Running, case: str, stream: bool):
    body, status, param, code, says = HTTP[case]
    require_refusal(httpx.post(f"{one_p_one_d.http}/v1/completions", json={**body, "stream": stream}), status, says)
    error = httpx.post(f"{one_p_one_d.http}/v1/completions", json=body).json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)


@pytest.mark.parametrize("content", ['{"prompt": "Hi"', "[]", "prompt=Hi", '{"prompt": "\\ud800"}'])
def test_http_refuses_malformed_json(one_p_one_d: Running, content: str):
    headers = {"content-type": "application/json"}
    response = httpx.post(f"{one_p_one_d.http}/v1/completions", content=content, headers=headers)
    require_refusal(response, 400, "")


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "messages is empty"),
        ([{"role": "user", "content": "word " * 5000}], "2048 tokens"),
        ([{"role": "user"}], "content must be"),
        ("Hi", "messages"),
    ],
)
def test_http_refuses_bad_chats(one_p_one_d: Running, messages: Any, says: str):
    response = httpx.post(f"{one_p_one_d.http}/v1/chat/completions", json={"messages": messages})
    require_refusal(response, 400, says)
    assert response.json()["error"]["param"] == "messages"


def require_refusal(response: httpx.Response, status: int, says: str) -> None:
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    assert response.json().keys() == {"error"}
    assert response.json()["error"].keys() == {"message", "type", "param", "code"}
    require_one_clear_line(response.json()["error"]["message"], says)


def test_max_tokens_0_with_echo_is_no_mistake(one_p_one_d: Running):
    body = {"prompt": "Hello", "max_tokens": 0, "echo": True}
    response = httpx.post(f"{one_p_one_d.http}/v1/completions", json=body)
    assert (response.status_code, response.json()["choices"][0]["text"]) == (200, "Hello")


GRPC: dict[str, tuple[Any, dict[str, Any], type[KVFerryError], str, str]] = {
    "prompt too long": (TOO_LONG, {}, InvalidRequestError, "prompt", "2048 tokens"),
    "empty prompt": ("", {}, InvalidRequestError, "prompt", "empty"),
    "no messages": ([], {}, InvalidRequestError, "prompt", "empty"),
    "temperature -1": ("Hi", {"temperature": -1.0}, InvalidRequestError, "temperature", "temperature is -1"),
    "unknown model": ("Hi", {"model": "gpt-9"}, NotFoundError, "model", "'gpt-9' does not exist"),
    "max_tokens 0": ("Hi", {"max_tokens": 0}, InvalidRequestError, "max_tokens", "max_tokens is 0"),
    "token id too large": ([VOCAB_SIZE], {}, InvalidRequestError, "prompt", "0 to 49151"),
    "token id negative": ([-1], {}, InvalidRequestError, "prompt", "token id -1"),
}


@pytest.mark.parametrize("case", GRPC)
def test_grpc_refuses_with_typed_errors(one_p_one_d: Running, case: str):
    prompt, options, kind, param, says = GRPC[case]
    with Client(one_p_one_d.grpc) as client, pytest.raises(kind) as caught:
        client.generate(prompt, **options)
    assert type(caught.value) is kind
    assert caught.value.param == param
    require_one_clear_line(caught.value.message, says)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["", "--max-tokens", "4"], 2, "prompt is empty"),
        (["Hi", "--temperature", "-1"], 2, "temperature is -1"),
        (["Hi", "--max-tokens", "0"], 2, "max_tokens is 0"),
        (["word " * 3000], 2, "2048 tokens"),
        (["Hi", "--model", "gpt-9"], 1, "'gpt-9' does not exist"),
    ],
)
def test_the_command_line_refuses_in_one_line(one_p_one_d: Running, arguments: list[str], code: int, says: str):
    cluster = one_p_one_d.cluster
    answer = cluster.kvferry("generate", *arguments, "--name", cluster.name)
    assert (answer.returncode, answer.stdout) == (code, "")
    assert answer.stderr.startswith("kvferry: ")
    assert answer.stderr.endswith("\n")
    require_one_clear_line(answer.stderr.removesuffix("\n"), says)


def test_no_bad_input_reached_a_worker(one_p_one_d: Running):
    before = one_p_one_d.when_free(5)
    for body, *_ in HTTP.values():
        httpx.post(f"{one_p_one_d.http}/v1/completions", json=body)
    after = one_p_one_d.stats()
    assert all(after[role].num_steps == before[role].num_steps for role in before)
    assert all(after[role].blocks_free == before[role].blocks_free for role in before)
