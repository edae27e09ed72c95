"""What comes over a connection before there is a request."""

from __future__ import annotations

import asyncio

import pytest

from router.http.protocol import MAX_HEAD_BYTES
from tests.router.scripted import ScriptedRouter, words
from tests.router.serving import serving

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
            assert answer == b"reset" or (answer.startswith(b"HTTP/1.1 400") and b"65536 bytes" in answer)
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
