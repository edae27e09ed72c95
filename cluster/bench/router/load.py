"""The load: raw sockets that are kept alive, and as little Python a byte as will do."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import cast

_TIMEOUT_S = 60.0
_PROMPT = "The quick brown fox jumps over the lazy dog, and then it"


@dataclass(frozen=True, slots=True)
class Shape:
    """What is asked for: so many requests, by so many clients at once, one after the other."""

    num_requests: int
    num_clients: int
    max_tokens: int
    stream: bool


@dataclass(slots=True)
class Result:
    seconds: float
    num_requests: int
    # Server-sent events with a piece of an answer.
    num_events: int
    ttft_s: list[float] = field(default_factory=list)


class _Client(asyncio.Protocol):
    """One connection: asks, reads to the end of the answer, asks again."""

    def __init__(self, load: _Load) -> None:
        self._load = load
        self._answer = bytearray()
        self._asked_s = 0.0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._ask()

    def data_received(self, data: bytes) -> None:
        if not self._answer:
            self._load.result.ttft_s.append(time.perf_counter() - self._asked_s)
        self._answer += data
        if self._whole():
            self._load.took(bytes(self._answer))
            self._answer.clear()
            self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        self._load.left()

    def _whole(self) -> bool:
        if self._load.stream:
            return self._answer.endswith(b"0\r\n\r\n")
        head, end, body = self._answer.partition(b"\r\n\r\n")
        if not end:
            return False
        length = head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0]
        return len(body) >= int(length)

    def _ask(self) -> None:
        assert self._transport is not None
        if not self._load.wants_more():
            self._transport.close()
            return
        self._asked_s = time.perf_counter()
        self._transport.write(self._load.request)


class _Load:
    def __init__(self, shape: Shape, request: bytes) -> None:
        self.stream = shape.stream
        self.request = request
        self.result = Result(0.0, 0, 0)
        self.ended = asyncio.get_running_loop().create_future()
        self._left_to_ask = shape.num_requests
        self._num_clients = shape.num_clients

    def wants_more(self) -> bool:
        self._left_to_ask -= 1
        return self._left_to_ask >= 0

    def took(self, answer: bytes) -> None:
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(answer[:500].decode(errors="replace"))
        self.result.num_requests += 1
        self.result.num_events += max(0, answer.count(b"data: ") - 1)

    def left(self) -> None:
        self._num_clients -= 1
        if not self._num_clients:
            self.ended.set_result(None)


async def load(port: int, shape: Shape) -> Result:
    """Every connection is kept until all is answered."""
    body = {"prompt": _PROMPT, "max_tokens": shape.max_tokens, "stream": shape.stream, "ignore_eos": True}
    data = json.dumps({**body, "temperature": 0}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    asking = _Load(shape, f"{head}\r\n\r\n".encode() + data)
    loop = asyncio.get_running_loop()
    began_s = time.perf_counter()
    for _ in range(shape.num_clients):
        await loop.create_connection(lambda: _Client(asking), "127.0.0.1", port)
    async with asyncio.timeout(_TIMEOUT_S):
        await asking.ended
    asking.result.seconds = time.perf_counter() - began_s
    return asking.result
