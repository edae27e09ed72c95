"""The contestants: each moves the KV of so many tokens, from memory that is in no cache to memory that is in none."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio
import numpy as np

from cluster.bench.transfer.far_side import ACKNOWLEDGEMENT, BARE_METHOD, BARE_SERVICE
from cluster.bench.transfer.workers import LAYOUT
from protos import worker_pb2, worker_pb2_grpc
from workers.kv_transfer.base import Grant
from workers.kv_transfer.frame import HEADER_BYTES
from workers.request import Request, SamplingParams
from workers.wire import request_to_pb
from workers.worker import Worker

Move = Callable[[int], Awaitable[None]]
# Token 2 is the far side's sign that it could use the KV.
_TWO_TOKENS = SamplingParams(temperature=0.0, max_tokens=2)
_request_ids = itertools.count()


class Memcpy:
    """One copy by one core, as large pieces as there are."""

    def __init__(self, max_tokens: int) -> None:
        num_bytes = max_tokens * LAYOUT.token_bytes
        self._source, self._target = np.ones((2, 2 * num_bytes), np.uint8)
        self._turn = 0

    async def __call__(self, num_tokens: int) -> None:
        num_bytes = num_tokens * LAYOUT.token_bytes
        self._turn = num_bytes - self._turn  # What was copied last may be in the cache still.
        np.copyto(self._target[self._turn :][:num_bytes], self._source[self._turn :][:num_bytes])


class Socket:
    """Bytes over TCP to the other process, by blocking calls, acknowledged once at their end."""

    def __init__(self, address: str, frame_bytes: int) -> None:
        host, port = address.rsplit(":", 1)
        self._peer = socket.create_connection((host, int(port)))
        self._frame = bytes(frame_bytes)

    async def __call__(self, num_tokens: int) -> None:
        left = num_tokens * LAYOUT.token_bytes
        self._peer.sendall(left.to_bytes(8, "little"))
        while left:
            left -= self._peer.send(memoryview(self._frame)[:left])
        assert self._peer.recv(1) == ACKNOWLEDGEMENT


class BareGrpc:
    """The calls of the grpc transport: frames as large, as many in flight; nothing is read, hashed or kept."""

    def __init__(self, channel: grpc.aio.Channel, frame_bytes: int, num_in_flight: int) -> None:
        self._put: Any = channel.unary_unary(f"/{BARE_SERVICE}/{BARE_METHOD}")
        self._frame = bytes(HEADER_BYTES + frame_bytes)
        self._frame_bytes = frame_bytes
        self._num_in_flight = num_in_flight

    async def __call__(self, num_tokens: int) -> None:
        left = iter(range(-(-num_tokens * LAYOUT.token_bytes // self._frame_bytes)))

        async def send() -> None:
            for _ in left:
                await self._put(self._frame)

        await asyncio.gather(*(send() for _ in range(self._num_in_flight)))


class WholePath:
    """All that production does: reserve, chunks, frames, checksums, credits, the fence, commit."""

    def __init__(self, prefill: Worker, channel: grpc.aio.Channel) -> None:
        """`channel`: to the worker that it hands over to."""
        self._prefill = prefill
        self._stub = worker_pb2_grpc.WorkerServiceStub(channel)

    async def __call__(self, num_tokens: int) -> None:
        request = new_request([0] * num_tokens)
        await self._prefill.prefill(request, await reserve(self._stub, request))
        await handed_over(request)


async def reserve(stub: worker_pb2_grpc.WorkerServiceAsyncStub, request: Request) -> Grant:
    answer = await stub.Reserve(worker_pb2.ReserveRequest(request=request_to_pb(request)))
    return Grant.from_proto(answer.grant)


def new_request(token_ids: list[int], params: SamplingParams = _TWO_TOKENS) -> Request:
    return Request(f"bench-{next(_request_ids)}", token_ids, params, router_id="bench")


async def handed_over(request: Request) -> None:
    """Until the commit is acknowledged, some time after token 1."""
    ships = [task for task in asyncio.all_tasks() if task.get_name() == f"ship {request.request_id}"]
    await asyncio.gather(*ships)
