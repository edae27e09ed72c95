"""What comes over a connection before there is a request."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Receive, Scope, Send

from router.http.protocol import MAX_HEAD_BYTES
from tests.router.scripted import ScriptedRouter, words
from tests.router.serving import serving
from tests.router.test_slow_readers import GET, listening

BODY = b'{"prompt": "Hi", "max_tokens": 1}'


async def answer_to(port: int, parts: list[bytes]) -> bytes:
    """All that comes back until the server closes, or has answered in full."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0)
        async with asyncio.timeout(10):
            return await reader.read()
    except ConnectionError:
        return b"reset"
    finally:
        writer.close()


def head(filler: int, length: int = len(BODY)) -> bytes:
    lines = (
        "POST /v1/completions HTTP/1.1",
        f"x-filler: {'x' * filler}",
        f"content-length: {length}",
        "connection: close",
    )
    return "\r\n".join((*lines, "", "")).encode()


@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"])
def test_a_head_without_end_is_refused_before_it_fills_the_memory(end):
    async def main() -> None:
        async with serving(ScriptedRouter(words(" one"))) as server:
            parts = [b"GET /v1/models HTTP/1.1\r\nx-filler: ", *[b"x" * 8192] * 40, end]
            answer = await answer_to(server.http_port, parts)
            assert answer.startswith(b"HTTP/1.1 400")
            assert b"65536 bytes" in answer
            # The next request is answered.
            assert (await answer_to(server.http_port, [head(1), BODY])).startswith(b"HTTP/1.1 200")

    asyncio.run(main())


@pytest.mark.parametrize("filler", [1, MAX_HEAD_BYTES - 1024])
def test_heads_within_the_limit_and_bodies_above_it_are_read_however_they_are_cut(filler):
    body = BODY.replace(b"Hi", b"Hi " * 10) + b" " * (2 * MAX_HEAD_BYTES)

    async def main() -> None:
        async with serving(ScriptedRouter(words(" one"))) as server:
            whole = head(filler, len(body)) + body
            for size in (len(whole), 5000, 1000):
                parts = [whole[at : at + size] for at in range(0, len(whole), size)]
                assert (await answer_to(server.http_port, parts)).startswith(b"HTTP/1.1 200")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("request_line", "status"),
    [("TRACE /v1/completions", 405), ("POST /v1/nothing", 404), ("POST /v1/completions", 413)],
)
def test_the_answer_to_a_body_that_nobody_reads_is_not_lost_with_the_connection(request_line, status):
    """A connection that is closed while something is unread is reset."""

    async def main() -> None:
        async with serving(ScriptedRouter(words(" one")), max_body_bytes=1_000_000) as server:
            for _ in range(10):
                head = f"{request_line} HTTP/1.1\r\nhost: x\r\ncontent-length: 3000000\r\n\r\n".encode()
                parts = [head, *[b" " * 100_000] * 30]
                answer = await answer_to(server.http_port, parts)
                assert answer.startswith(f"HTTP/1.1 {status}".encode())
                assert answer.endswith(b"}")

    asyncio.run(main())


@pytest.mark.parametrize("trailer", [b"a: b\r\n", b"x" * 97])
def test_trailers_are_kept_by_nobody_and_are_not_endless(trailer):
    async def main() -> None:
        async with serving(ScriptedRouter(words(" one"))) as server:
            head = b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
            chunk = b"%x\r\n%b\r\n" % (len(BODY), BODY)
            few = await answer_to(server.http_port, [head, chunk, b"0\r\n", b"a: b\r\n" * 9, b"\r\n"])
            assert few.startswith(b"HTTP/1.1 200")
            endless = [head, chunk, b"0\r\n", *[trailer * 100] * 200]
            answer = await answer_to(server.http_port, endless)
            assert answer.startswith(b"HTTP/1.1 400")
            assert b"65536 bytes" in answer

    asyncio.run(main())


def test_a_head_that_begins_behind_a_large_body_is_not_as_large_as_that():
    async def main() -> None:
        async with serving(ScriptedRouter(words(" one"))) as server:
            body = BODY + b" " * 100_000
            first = head(1, len(body)).replace(b"connection: close\r\n", b"") + body
            second = head(1) + BODY
            answer = await answer_to(server.http_port, [first + second[:40], second[40:]])
            assert answer.count(b"HTTP/1.1 200") == 2

    asyncio.run(main())


class TwoPieces:
    """Answers in two pieces, the second when it is told to."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        await self.go_on.wait()
        await send({"type": "http.response.body", "body": b"two"})


@pytest.mark.parametrize(
    "garbage", [b"no HTTP\r\n\r\n", GET + b"no HTTP\r\n\r\n", b"GET / HTTP/1.1\r\nx: " + bytes(99_000)]
)
def test_what_comes_after_a_request_does_not_get_into_the_middle_of_its_answer(garbage):
    async def main() -> None:
        app = TwoPieces()
        async with listening(app, timeout_s=10) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(GET)
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"transfer-encoding: chunked" in head
            for _ in range(20):
                writer.write(garbage)
                await asyncio.sleep(0.005)
            app.go_on.set()
            async with asyncio.timeout(5):
                assert await reader.read() == b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"
            writer.close()

    asyncio.run(main())
