"""`python -m cluster.bench.compare.nixl_proxy PORT PREFILL_PORT DECODE_PORT`: in front of two vLLM servers.

Each request goes to the first for one token, and with what that tells of its KV to the second, which answers. Streams
of /v1/completions only.
"""

from __future__ import annotations

import asyncio
import sys
import uuid
from typing import Any

import aiohttp
from aiohttp import web

_TIMEOUT_S = 900.0
_NO_KV_YET = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class Proxy:
    def __init__(self, session: aiohttp.ClientSession, prefill_port: int, decode_port: int) -> None:
        self._session = session
        self._prefill, self._decode = (
            f"http://127.0.0.1:{port}/v1/completions" for port in (prefill_port, decode_port)
        )

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        headers = {"X-Request-Id": uuid.uuid4().hex}
        try:
            kv = await self._prefilled(body, headers)
        except (aiohttp.ClientError, TimeoutError) as error:
            return web.Response(status=503, text=str(error))
        asked = {**body, "kv_transfer_params": kv}
        async with self._session.post(self._decode, json=asked, headers=headers) as answer:
            relayed = web.StreamResponse(status=answer.status, headers={"content-type": "text/event-stream"})
            await relayed.prepare(request)
            async for data in answer.content.iter_any():
                await relayed.write(data)
        await relayed.write_eof()
        return relayed

    async def _prefilled(self, body: dict[str, Any], headers: dict[str, str]) -> Any:
        """What the decode server needs to fetch the prompt's KV."""
        one_token = {key: value for key, value in body.items() if key != "stream_options"}
        one_token |= {"stream": False, "max_tokens": 1, "kv_transfer_params": _NO_KV_YET}
        async with self._session.post(self._prefill, json=one_token, headers=headers) as answer:
            answer.raise_for_status()
            return (await answer.json()).get("kv_transfer_params")


async def serve(port: int, prefill_port: int, decode_port: int) -> None:
    timeout, connector = aiohttp.ClientTimeout(total=_TIMEOUT_S), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        app = web.Application()
        app.router.add_post("/v1/completions", Proxy(session, prefill_port, decode_port).complete)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(*map(int, sys.argv[1:])))
