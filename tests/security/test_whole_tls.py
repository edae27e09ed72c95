"""A router over two workers under security.tls, all on real sockets: what they answer, and to whom."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import openai
import pytest

from cluster.client import AsyncClient, Client
from router.server import Identity
from tests.router.whole import GOOD, Whole, whole_router
from tests.security.certificates import Certificates
from tests.security.strangers import context_of, foreign_context, got_from
from workers.errors import UnavailableError
from workers.security_config import SecurityConfig
from workers.tls import membership


@asynccontextmanager
async def whole_with_tls(folder: Path) -> AsyncIterator[Whole]:
    security = SecurityConfig(tls=str(folder))
    identity = Identity(cluster_name="one", tls=membership(security, "one"))
    async with whole_router({"security": security}, identity=identity) as whole:
        yield whole


def ports_of(whole: Whole) -> dict[str, int]:
    workers = {worker.config.name: int(worker.address.rpartition(":")[2]) for worker in whole.workers}
    server = whole.serving.server
    return {"http": server.http_port, "grpc": server.grpc_port, **workers}


async def transports(client: AsyncClient) -> set[str]:
    """By which workers have sent KV, as far as the router has heard."""
    return {peer.transport for worker in (await client.status()).workers for peer in worker.stats.peers}


def test_answers_are_those_of_plain_text(ours: Certificates):
    """By https, by openai's client and by our own; tokens and KV go from worker to worker by TLS."""

    async def plain() -> str:
        async with whole_router() as whole, whole.client() as client:
            return str((await client.post("/v1/completions", json=GOOD)).json()["choices"][0]["text"])

    async def encrypted() -> list[str]:
        async with whole_with_tls(ours.member()) as whole:
            ann = ours.client()
            base_url = f"https://127.0.0.1:{whole.http_port}"
            async with httpx.AsyncClient(verify=context_of(ann), trust_env=False, base_url=base_url) as http:
                told = (await http.post("/v1/completions", json=GOOD)).json()["choices"][0]["text"]
            by_openai = openai.DefaultAsyncHttpxClient(verify=context_of(ann), trust_env=False)
            async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none", http_client=by_openai) as api:
                whole_answer = await api.completions.create(
                    model="smol", prompt="Hello", max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
                )
            async with AsyncClient(whole.grpc_target, tls=ann) as native:
                answer = await native.generate("Hello", max_tokens=8, temperature=0.0, ignore_eos=True)
                assert (await native.status()).http_endpoint.startswith("https://")
                async with asyncio.timeout(5):
                    while await transports(native) != {"grpc"}:  # noqa: ASYNC110  It is a heartbeat that is waited for.
                        await asyncio.sleep(0.05)
            return [told, whole_answer.choices[0].text, answer.text]

    text = asyncio.run(plain())
    assert asyncio.run(encrypted()) == [text, text, text]
    assert text


def test_no_port_answers_a_stranger(ours: Certificates, foreign: Certificates):
    async def main() -> None:
        member, ann = ours.member(), ours.client()
        strangers = {
            "in plain text": None,
            "without a certificate": context_of(member, certificate=False),
            "a member by a foreign authority": foreign_context(member, foreign.member()),
            "a client by a foreign authority": foreign_context(member, foreign.client()),
        }
        async with whole_with_tls(member) as whole:
            for name, port in ports_of(whole).items():
                for who, context in strangers.items():
                    assert await asyncio.to_thread(got_from, port, context) == b"", (name, who)
                assert await asyncio.to_thread(got_from, port, context_of(ann)), name

    asyncio.run(main())


@pytest.mark.parametrize("how", ["nothing", "only whom to trust"])
def test_a_client_without_a_certificate_is_told_what_it_needs(ours: Certificates, how):
    async def main() -> None:
        async with whole_with_tls(ours.member()) as whole:
            tls = None if how == "nothing" else ours.client() / "ca.crt"

            def ask() -> None:
                with Client(whole.grpc_target, tls=tls) as client:
                    client.status()

            with pytest.raises(UnavailableError, match="KVFERRY_TLS"):
                await asyncio.to_thread(ask)

    asyncio.run(main())
