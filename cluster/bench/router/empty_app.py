"""What FastAPI and SSE cost alone: an app that answers like the router and does nothing.

Its events come as tokens do, one a step for every answer that runs: written all at once, they would cost
the sockets less.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

_EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1700000000,'
    b'"model":"HuggingFaceTB/SmolLM2-135M-Instruct","choices":[{"index":0,"text":" word","logprobs":null,'
    b'"finish_reason":null}]}\n\n'
)


class Steps:
    """One clock for all answers, as a worker's steps are."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self.passed = asyncio.Event()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._step_s)
            self.passed.set()
            self.passed.clear()


def build(steps: Steps) -> FastAPI:
    app = FastAPI(openapi_url=None)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = json.loads(await request.body())
        if not body["stream"]:
            return JSONResponse({"id": "cmpl-0", "choices": [{"index": 0, "text": " word" * body["max_tokens"]}]})
        return StreamingResponse(_events(body["max_tokens"], steps), media_type="text/event-stream")

    return app


async def _events(count: int, steps: Steps) -> AsyncIterator[bytes]:
    yield _EVENT
    for _ in range(count - 1):
        await steps.passed.wait()
        yield _EVENT
    yield b"data: [DONE]\n\n"
