"""An OpenAI-compatible server without a model, whose latencies are known: it notes when it sent what."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from cluster.bench.load import Target


@dataclass(slots=True)
class Served:
    """Of one request, by the clock of the event loop."""

    came_s: float
    prompt: list[int]
    sent_s: list[float] = field(default_factory=list)


class StubServer:
    """Each answer's first token comes after `ttft_s` and the others `tpot_s` apart, `num_at_once` answers at a time."""

    def __init__(self, ttft_s: float, tpot_s: float, num_at_once: int = 1000) -> None:
        self.ttft_s, self.tpot_s = ttft_s, tpot_s
        self.served: list[Served] = []
        self.num_running = self.max_num_running = 0
        self._room = asyncio.Semaphore(num_at_once)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        served = Served(asyncio.get_running_loop().time(), body["prompt"])
        self.served.append(served)
        self.num_running += 1
        self.max_num_running = max(self.max_num_running, self.num_running)
        try:
            async with self._room:
                return await self._answer(request, body, served)
        finally:
            self.num_running -= 1

    async def _answer(self, request: web.Request, body: Mapping[str, Any], served: Served) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        loop = asyncio.get_running_loop()
        due_s = loop.time() + self.ttft_s
        for _ in range(body["max_tokens"]):
            await asyncio.sleep(due_s - loop.time())
            served.sent_s.append(loop.time())
            await response.write(_event({"choices": [{"index": 0, "text": "x"}]}))
            due_s += self.tpot_s
        await response.write(_event({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}}))
        await response.write(b"data: [DONE]\n\n")
        return response


def _event(value: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


@asynccontextmanager
async def served_by(stub: StubServer) -> AsyncGenerator[Target]:
    app = web.Application()
    app.router.add_post("/v1/completions", stub.complete)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield Target(f"http://127.0.0.1:{runner.addresses[0][1]}", "stub")
    finally:
        await runner.cleanup()
