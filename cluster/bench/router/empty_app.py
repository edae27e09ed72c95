"""What FastAPI and SSE cost alone: an app that answers like the router and does nothing."""

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


def build() -> FastAPI:
    app = FastAPI(openapi_url=None)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = json.loads(await request.body())
        if not body["stream"]:
            return JSONResponse({"id": "cmpl-0", "choices": [{"index": 0, "text": " word" * body["max_tokens"]}]})
        return StreamingResponse(_events(body["max_tokens"]), media_type="text/event-stream")

    return app


async def _events(count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield _EVENT
        # Tokens come one after the other: their events go out one by one too.
        await asyncio.sleep(0)
    yield b"data: [DONE]\n\n"
