"""A thousand bad requests at a real router: each is refused in order, nothing leaks, and good ones are answered."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections import Counter
from typing import Any

import pytest

from tests.router.bad_requests import KINDS, Bad, bad_request
from tests.router.whole import GOOD, Whole, num_open_files, whole_router

NUM_REQUESTS, AT_ONCE = 1000, 25
SEED = 5
LIMITS: dict[str, Any] = {"max_body_bytes": 65_536, "body_timeout_s": 0.5}


async def send(port: int, bad: Bad) -> int | None:
    """The status of the answer; None: the connection was closed without one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(bad.data)
        if bad.then == "close":
            return None
        # Whatever it is, it ends: the longest wait is for a body that does not come.
        async with asyncio.timeout(20):
            head = await reader.readuntil(b"\r\n")
            return int(head.split()[1])
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    finally:
        writer.transport.abort()


async def require_good(whole: Whole) -> None:
    async with whole.client() as http:
        response = await http.post("/v1/completions", json=GOOD)
        assert (response.status_code, response.json()["usage"]["completion_tokens"]) == (200, 8)


def test_a_thousand_bad_requests_cost_no_error_of_ours_no_leak_and_nobody_elses_answer(caplog):
    rng = random.Random(SEED)
    requests = [bad_request(rng) for _ in range(NUM_REQUESTS)]
    assert {bad.kind for bad in requests} == set(KINDS)
    statuses: Counter[tuple[str, int | None]] = Counter()

    async def main() -> None:
        # A busy machine may take its time with the good ones.
        async with whole_router(**LIMITS | {"body_timeout_s": 2.0}) as whole:
            await require_good(whole)
            await whole.until_idle()
            tasks, files = len(asyncio.all_tasks()), num_open_files()
            gate = asyncio.Semaphore(AT_ONCE)

            async def one(bad: Bad) -> None:
                async with gate:
                    status = await send(whole.http_port, bad)
                    assert status is None or status < 500 or status == 503, (status, bad)
                    statuses[bad.kind, status] += 1

            async with asyncio.TaskGroup() as group:
                for at, bad in enumerate(requests):
                    group.create_task(one(bad))
                    if at % 200 == 0:
                        group.create_task(require_good(whole))
            await require_good(whole)
            await whole.until_idle()
            async with asyncio.timeout(5):
                while len(asyncio.all_tasks()) > tasks or num_open_files() > files:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)

    asyncio.run(main())
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert statuses.total() == NUM_REQUESTS
    assert statuses["odd fields", 400] > 100
    assert statuses["too large", 413] > 10
    assert statuses["wrong places", 405] > 10


async def answer_of(whole: Whole, *pieces: bytes, pause_s: float = 0.0) -> bytes:
    """All that comes until the connection is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", whole.http_port)
    try:
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(pause_s)
        async with asyncio.timeout(5):
            return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n", b"413"),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{", b"408"),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{", b"408"),
        (b"nonsense\r\n\r\n", b"400"),
    ],
)
def test_a_body_that_is_too_large_or_does_not_come_is_refused_and_its_connection_closed(head, status):
    async def main() -> None:
        async with whole_router(**LIMITS) as whole:
            answer = await answer_of(whole, head)
            assert answer.startswith(b"HTTP/1.1 " + status)
            assert b"connection: close" in answer.lower()
            error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
            assert error["type"] == "invalid_request_error"

    asyncio.run(main())


@pytest.mark.parametrize(
    "pieces", [(b"",), (b"POST /v1/comp",), (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /heal", b"th HT")]
)
def test_a_head_that_does_not_come_is_not_waited_for(pieces):
    async def main() -> None:
        async with whole_router(**LIMITS) as whole:
            began_s = asyncio.get_running_loop().time()
            answer = await answer_of(whole, *pieces, pause_s=0.1)
            assert asyncio.get_running_loop().time() - began_s < 3
            assert answer.count(b"HTTP/1.1 200") == len(pieces) // 2

    asyncio.run(main())


def test_a_slow_body_that_comes_in_time_is_answered():
    async def main() -> None:
        async with whole_router(**LIMITS) as whole:
            body = json.dumps(GOOD).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
            pieces = [(head % len(body))[:20], (head % len(body))[20:], *(body[i : i + 16] for i in range(0, 96, 16))]
            answer = await answer_of(whole, *pieces[:-1], pieces[-1] + body[96:], pause_s=0.03)
            assert answer.startswith(b"HTTP/1.1 200")

    asyncio.run(main())
