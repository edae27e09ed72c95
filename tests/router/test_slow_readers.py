"""Clients that do not read what they have asked for."""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from router.http.patience import PatientProtocol

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


class Talker:
    """Says more than any buffer takes, until nobody hears it; a piece at a time."""

    def __init__(self, piece_bytes: int = 100_000) -> None:
        self._piece = b"x" * piece_bytes
        self.num_bytes = 0
        self.gone = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        talking = asyncio.create_task(self._talk(send))
        while (await receive())["type"] != "http.disconnect":
            pass
        talking.cancel()
        self.gone.set()

    async def _talk(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": self._piece, "more_body": True})
            self.num_bytes += len(self._piece)


@asynccontextmanager
async def listening(app: ASGIApp, timeout_s: float, sndbuf: int = 0) -> AsyncIterator[int]:
    protocol = cast(Any, functools.partial(PatientProtocol, timeout_s=timeout_s))
    config = uvicorn.Config(app, http=protocol, ws="none", lifespan="off", log_config=None)
    config.load()
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    if sndbuf:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, sndbuf)
    server.lifespan = config.lifespan_class(config)
    await server.startup(sockets=[listener])
    try:
        yield listener.getsockname()[1]
    finally:
        await server.shutdown(sockets=[listener])


@pytest.mark.parametrize(("reads", "piece_bytes"), [(False, 100_000), (True, 100_000), (True, 60_000_000)])
def test_a_client_that_reads_nothing_of_its_answer_is_gone_in_time(reads, piece_bytes):
    async def main() -> None:
        app = Talker(piece_bytes)
        async with listening(app, timeout_s=0.3) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(GET)
            await asyncio.sleep(0.05)
            if reads:
                for _ in range(20):
                    await reader.readexactly(500_000)
                    await asyncio.sleep(0.05)
                assert not app.gone.is_set()
            async with asyncio.timeout(5):
                await app.gone.wait()
            writer.transport.abort()

    asyncio.run(main())


@pytest.mark.parametrize("ends", [b"", b"connection: close\r\n"])
def test_a_client_that_leaves_a_little_unread_is_gone_in_time_too(ends):
    """Less than what would have paused the writing, so that the answer is complete on our side."""

    async def say(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * 60_000})

    def dial(port: int) -> socket.socket:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", port))
        return client

    async def main() -> None:
        async with listening(say, timeout_s=0.3, sndbuf=4096) as port:
            client = await asyncio.to_thread(dial, port)
            with client:
                client.sendall(GET.replace(b"\r\n\r\n", b"\r\n" + ends + b"\r\n"))
                await asyncio.sleep(2)
                client.settimeout(5)
                received = b""
                with suppress(ConnectionResetError):
                    while piece := await asyncio.to_thread(client.recv, 65536):
                        received += piece
            assert len(received) < 60_000

    asyncio.run(main())
