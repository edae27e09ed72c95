"""Requests that no client should send, from a seeded generator: bytes for a socket, and how they are sent."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize")
GOOD: dict[str, dict[str, Any]] = {
    PATHS[0]: {"prompt": "Hello", "max_tokens": 3, "temperature": 0},
    PATHS[1]: {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, "stream": True},
    PATHS[2]: {"input": "Hello", "max_output_tokens": 3, "stream": True},
    PATHS[3]: {"prompt": "Hello"},
    PATHS[4]: {"tokens": [5, 6]},
}
FIELDS = (
    "prompt", "messages", "model", "n", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids",
    "min_p", "logit_bias", "min_tokens", "logprobs", "top_logprobs", "prompt_logprobs", "stream", "stream_options",
    "cache_salt", "priority", "slo", "echo", "best_of", "response_format", "guided_regex", "structured_outputs",
    "input", "tokens", "text", "instructions", "tool_choice", "max_output_tokens", "add_special_tokens",
    "tools", "ignore_eos", "repetition_penalty", "include_stop_str_in_output", "max_completion_tokens", "suffix",
)  # fmt: skip
JSON = "application/json"


@dataclass(frozen=True)
class Bad:
    kind: str
    data: bytes
    # What is to happen after the data: read the answer, close at once, or send nothing more and see.
    then: str = "read"


def bad_request(rng: random.Random) -> Bad:
    kind = rng.choices(list(KINDS), weights=[weight for weight, _ in KINDS.values()])[0]
    bad = KINDS[kind][1](rng)
    return Bad(kind, bad.data, bad.then)


def _post(body: bytes, path: str = PATHS[0], then: str = "read", **headers: str) -> Bad:
    fields = {"Host": "x", "Content-Type": JSON, "Content-Length": str(len(body))}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return Bad("", f"POST {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1", "replace") + body, then)


def _odd_value(rng: random.Random) -> Any:
    return rng.choice(
        (
            None, True, False, -1, 0, 2**31, 2**63, 2**70, -(2**64), 10**400, 1e308, float("nan"), float("inf"), -0.0,
            "", "x" * rng.randrange(1, 2000), "\ud800", "\x00", [], {}, [[]], [None], ["", 1], [2**40], [-1],
            {"a": {"b": []}}, [{"role": "user"}], [{"role": 5, "content": {}}], {"type": "json_schema"},
            {"json": {"type": "nonsense"}}, {"regex": "("}, {"ttft_ms": -1}, {"tpot_ms": "x"}, "(" * 50, [True, 1],
            {str(2**50): 1}, {"x": 1}, {"include_usage": 3}, [[5], "a"],
        )
    )  # fmt: skip


def _odd_fields(rng: random.Random) -> Bad:
    path = rng.choice(PATHS)
    body = dict(GOOD[path])
    for _ in range(rng.randrange(1, 4)):
        body[rng.choice(FIELDS)] = _odd_value(rng)
    return _post(json.dumps(body).encode(), path)


def _odd_json(rng: random.Random) -> Bad:
    good = json.dumps(GOOD[PATHS[0]])
    depth = rng.randrange(100, 15_000)
    bodies = (
        b"", b"null", b"[]", b'"text"', b"5", b"{", good.encode()[: rng.randrange(len(good))], good.encode() * 2,
        b'{"prompt": ' + b"[" * depth + b"]" * depth + b"}", b'{"a":' * depth + b"1" + b"}" * depth,
        b'{"prompt": "\xff\xfe"}', b"\xef\xbb\xbf" + good.encode(), good.encode("utf-16"), good.encode("utf-32"),
        b'{"prompt": "Hi", "seed": ' + b"9" * rng.randrange(100, 9000) + b"}", b'{"temperature": 1e999, "prompt": "a"}',
        b'{"prompt": "Hi", "prompt": 5}', b"{'prompt': 'Hi'}", rng.randbytes(rng.randrange(1, 3000)),
    )  # fmt: skip
    return _post(rng.choice(bodies), rng.choice(PATHS))


def _odd_encodings(rng: random.Random) -> Bad:
    good = json.dumps(GOOD[PATHS[0]]).encode()
    return rng.choice(
        (
            _post(gzip.compress(good), Content_Encoding="gzip"),
            _post(good, Content_Type="text/plain"),
            _post(good, Content_Type="multipart/form-data; boundary=x"),
            _post(good, Content_Type="\x80" * 300),
            _post(good, Content_Encoding="br", Content_Type="application/json; charset=klingon"),
        )
    )


def _odd_headers(rng: random.Random) -> Bad:
    good = json.dumps(GOOD[PATHS[0]]).encode()
    return rng.choice(
        (
            _post(good, Content_Length=rng.choice(("-1", "abc", "1e3", "9" * 30, "+5", ""))),
            _post(good, X_Request_Id=rng.choice(("a b", "\xe9", "x" * 5000, ""))),
            _post(good, Authorization=rng.choice(("Bearer", "Basic \xff", "x" * 3000))),
            _post(good, Transfer_Encoding="chunked"),
            _post(good, Expect="100-continue"),
            _post(good, Upgrade="websocket", Connection="Upgrade"),
            _post(good, Host="", Range="bytes=0-5", X_Kvferry_Timeline="\x01"),
            _post(good, Big="y" * rng.randrange(1000, 100_000)),
            _post(good, **{"Bad Name": "x"}),
        )
    )


def _no_http(rng: random.Random) -> Bad:
    datas = (
        rng.randbytes(rng.randrange(1, 2000)), b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\r\n\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nno colon here\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET /" + b"a" * rng.randrange(1, 100_000) + b" HTTP/1.1\r\n\r\n",
        b"GET /%ff%00%2e%2e HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nhello\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\na",
    )  # fmt: skip
    return Bad("", rng.choice(datas), rng.choice(("read", "close")))


def _wrong_places(rng: random.Random) -> Bad:
    method = rng.choice(("GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "CONNECT", "BREW", "post"))
    path = rng.choice((*PATHS, "/", "/v1", "/v1/models/none", "/v1/completions/", "/health", "/metrics", "//", "/../x"))
    query = rng.choice(("", "?a=%zz&b", "?" + "q" * 2000))
    return Bad("", f"{method} {path}{query} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{{}}".encode())


def _too_large(rng: random.Random) -> Bad:
    body = json.dumps({"prompt": "a" * rng.randrange(70_000, 200_000)}).encode()
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:40_000], body[40_000:])) + b"0\r\n\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    return rng.choice(
        (
            _post(body),
            _post(b"", Content_Length=str(rng.randrange(100_000, 2**60))),
            Bad("", head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks),
        )
    )


def _partial(rng: random.Random) -> Bad:
    whole = _post(json.dumps(GOOD[PATHS[0]]).encode()).data
    return Bad("", whole[: rng.randrange(1, len(whole))], rng.choices(("close", "stall"), (9, 1))[0])


def _gone(rng: random.Random) -> Bad:
    path = rng.choice(PATHS)
    return _post(json.dumps({**GOOD[path], "max_tokens": 30}).encode(), path, "close")


# Weight and maker of each kind.
KINDS: dict[str, tuple[int, Callable[[random.Random], Bad]]] = {
    "odd fields": (40, _odd_fields),
    "odd JSON": (15, _odd_json),
    "odd encodings": (5, _odd_encodings),
    "odd headers": (8, _odd_headers),
    "no HTTP": (8, _no_http),
    "wrong places": (8, _wrong_places),
    "too large": (5, _too_large),
    "partial": (6, _partial),
    "gone": (5, _gone),
}
