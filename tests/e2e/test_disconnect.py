"""Clients that go away, before token 1 and in the middle: the blocks of both sides are free within 2 s."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from urllib.parse import urlsplit

import pytest

from cluster.client import AsyncClient, Client
from protos.worker_pb2 import WorkerStats
from tests.e2e.clusters import Running, wait_until
from tests.prompts import questions, token_ids

pytestmark = pytest.mark.ray

WITHIN_S = 2.0
MAX_TOKENS = 400
# Three steps of prefill: long enough to be left in the middle of it.
LONG = (token_ids(questions(1)[0]) * 100)[:1500]
SHORT = LONG[:40]


@contextmanager
def http_stream(running: Running, prompt: list[int], stream: bool = True) -> Iterator[Callable[[], None]]:
    """Posts a completion on a socket of its own; what is yielded reads until some tokens are there."""
    body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "stream": stream, "ignore_eos": True, "temperature": 0}
    data = json.dumps(body).encode()
    place = urlsplit(running.http)
    assert place.hostname is not None
    with socket.create_connection((place.hostname, place.port or 80)) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)

        def read_some() -> None:
            seen = b""
            while seen.count(b"data: ") < 4:
                seen += connection.recv(1 << 16)

        yield read_some


@contextmanager
def grpc_stream(running: Running, prompt: list[int]) -> Iterator[Callable[[], None]]:
    with (
        Client(running.grpc) as client,
        closing(client.stream(prompt, max_tokens=MAX_TOKENS, ignore_eos=True, temperature=0.0)) as chunks,
    ):

        def read_some() -> None:
            for _ in range(4):
                next(chunks)

        yield read_some


def handed_over(stats: dict[str, WorkerStats]) -> bool:
    return stats["decode"].num_running == 1


def being_computed(stats: dict[str, WorkerStats]) -> bool:
    return stats["decode"].blocks_reserved > 0 and stats["prefill"].num_running == 1


def require_aborted(running: Running, before: dict[str, WorkerStats]) -> None:
    """Free within the time allowed, and not because the answer had come to its end."""
    after = running.when_free(WITHIN_S)
    assert after["decode"].num_output_tokens - before["decode"].num_output_tokens < MAX_TOKENS - 1


@pytest.mark.parametrize("api", [http_stream, grpc_stream])
def test_a_client_that_leaves_mid_stream_frees_both_sides(one_p_one_d: Running, api):
    before = one_p_one_d.when_free(5)
    with api(one_p_one_d, SHORT) as read_some:
        read_some()
        assert handed_over(one_p_one_d.stats())
    require_aborted(one_p_one_d, before)


def test_a_client_that_leaves_while_the_whole_answer_is_made_frees_both_sides(one_p_one_d: Running):
    before = one_p_one_d.when_free(5)
    with http_stream(one_p_one_d, SHORT, stream=False):
        wait_until(one_p_one_d.stats, handed_over, 10)
    require_aborted(one_p_one_d, before)


def test_an_http_client_that_leaves_before_token_1_frees_both_sides(one_p_one_d: Running):
    before = one_p_one_d.when_free(5)
    with http_stream(one_p_one_d, LONG):
        wait_until(one_p_one_d.stats, being_computed, 10)
    require_aborted(one_p_one_d, before)
    after = one_p_one_d.stats()
    assert after["prefill"].num_output_tokens == before["prefill"].num_output_tokens


def test_a_grpc_client_that_leaves_before_token_1_frees_both_sides(one_p_one_d: Running):
    before = one_p_one_d.when_free(5)

    async def leave_early() -> None:
        async with AsyncClient(one_p_one_d.grpc) as client:
            asking = asyncio.create_task(client.generate(LONG, max_tokens=MAX_TOKENS, temperature=0.0))
            await asyncio.to_thread(wait_until, one_p_one_d.stats, being_computed, 10)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            assert asking.cancelled()

    asyncio.run(leave_early())
    require_aborted(one_p_one_d, before)
    after = one_p_one_d.stats()
    assert after["prefill"].num_output_tokens == before["prefill"].num_output_tokens
