"""The HTTP port under security.tls: real handshakes over loopback."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.certs import issue_member, open_authority
from router.server import listen, server_of
from tests.security.certificates import DAYS, Certificates
from workers.tls import Membership


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["scheme"].encode()})


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[int]:
    listener = listen("127.0.0.1", 0)
    server = server_of(hello, 10.0, Membership(folder))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    await server.answering.wait()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await task


def context_of(folder: Path, *, certificate: bool = True) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    if certificate:
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    return context


async def get(port: int, context: ssl.SSLContext | None, scheme: str = "https") -> str:
    async with httpx.AsyncClient(verify=context or True, trust_env=False) as client:
        return (await client.get(f"{scheme}://127.0.0.1:{port}/")).text


def test_a_client_with_a_certificate_is_answered(ours: Certificates):
    async def main() -> None:
        async with serving(ours.member()) as port:
            assert await get(port, context_of(ours.client())) == "https"

    asyncio.run(main())


@pytest.mark.parametrize("who", ["in plain text", "without a certificate", "of another authority"])
def test_nobody_else_is(ours: Certificates, foreign: Certificates, who):
    async def main() -> None:
        member = ours.member()
        mixed = context_of(ours.client(), certificate=False)
        if who == "of another authority":
            mixed.load_cert_chain(foreign.client() / "tls.crt", foreign.client() / "tls.key")
        async with serving(member) as port:
            with pytest.raises(httpx.TransportError):
                await get(port, mixed, "http" if who == "in plain text" else "https")

    asyncio.run(main())


def test_new_files_are_taken_without_a_restart(ours: Certificates):
    async def main() -> None:
        member, old = ours.member(), context_of(ours.client())
        async with serving(member) as port, httpx.AsyncClient(verify=old, trust_env=False) as kept:
            url = f"https://127.0.0.1:{port}/"
            assert (await kept.get(url)).text == "https"
            issue_member(open_authority(ours.folder / "new authority"), member, "one", [], DAYS)
            assert await get(port, context_of(member)) == "https"
            with pytest.raises(httpx.TransportError):
                await get(port, old)
            trusting = context_of(member, certificate=False)
            trusting.load_cert_chain(ours.client() / "tls.crt", ours.client() / "tls.key")
            with pytest.raises(httpx.TransportError):
                await get(port, trusting)
            assert (await kept.get(url)).text == "https"

    asyncio.run(main())
