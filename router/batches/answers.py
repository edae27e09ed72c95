"""Answers to a batch's lines: those of the HTTP API's own routes, asked in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.types import ASGIApp, Message

from router.batches.lines import output_line
from router.jobs.records import Answer, Claim, Used
from router.openai.wire import error_body
from workers.errors import KVFerryError, OverloadedError, UnavailableError

_TOO_MANY = 429


class HttpAnswerer:
    """A prompt is a line's custom_id and body, an answer a line of an output file."""

    def __init__(self, app: FastAPI) -> None:
        # Past the middleware: keys, limits and CORS were the submitter's affair.
        handlers = {key: handle for key, handle in app.exception_handlers.items() if key not in (500, Exception)}
        self._app: ASGIApp = AsyncExitStackMiddleware(ExceptionMiddleware(app.router, handlers=handlers))
        self._owner = app

    async def answer(self, claim: Claim) -> Answer:
        line = json.loads(claim.body)
        status, answer = await self._post(claim.kind, line["body"], claim.request_id)
        if status == _TOO_MANY or status >= 500:
            error = OverloadedError if status == _TOO_MANY else UnavailableError if status == 503 else KVFerryError
            raise error(answer.get("error", {}).get("message", f"status {status}"))
        failed = status >= 400
        return Answer(
            output_line(line["custom_id"], claim.request_id, status, answer),
            failed,
            Used() if failed else _used(answer.get("usage") or {}),
        )

    def failure(self, claim: Claim, error: KVFerryError) -> Answer:
        custom_id = json.loads(claim.body)["custom_id"]
        return Answer(output_line(custom_id, claim.request_id, error.http_status, error_body(error)), failed=True)

    async def _post(self, path: str, body: dict[str, Any], request_id: str) -> tuple[int, dict[str, Any]]:
        """Status and body of the route's answer. Cancelling it is a client that goes away."""
        request: list[Message] = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        status, parts = 0, bytearray()

        async def receive() -> Message:
            if request:
                return request.pop()
            await asyncio.Event().wait()
            raise AssertionError("nobody sets it")

        async def send(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            parts.extend(message.get("body", b""))

        await self._app(self._scope(path, request_id), receive, send)
        return status, json.loads(bytes(parts))

    def _scope(self, path: str, request_id: str) -> dict[str, Any]:
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "client": None,
            "server": None,
            "state": {"request_id": request_id},
            "app": self._owner,
        }


def _used(usage: Mapping[str, Any]) -> Used:
    """By the names of either API of OpenAI."""
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return Used(
        usage.get("prompt_tokens", usage.get("input_tokens", 0)),
        usage.get("completion_tokens", usage.get("output_tokens", 0)),
        details.get("cached_tokens", 0),
    )
