"""HTTP around the answers: bodies in, errors in OpenAI's shape, and a client that goes away."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.limits import valid_request_id
from router.openai.wire import error_body, error_object, event
from router.text import new_request_id
from router.traces import TRACEPARENT
from workers.errors import InvalidRequestError, KVFerryError, OverloadedError

logger = logging.getLogger(__name__)

_SSE_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
# Long enough for a worker to come back, short enough not to be noticed.
_RETRY_AFTER_S = 1.0


async def read_json(request: Request) -> dict[str, Any]:
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise InvalidRequestError(f"content-type is {kind[:80]!r}; send application/json")
    try:
        body = json.loads(await request.body(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not valid JSON ({error}); mend it") from error
    if not isinstance(body, dict):
        raise InvalidRequestError(f"the body must be a JSON object; got {type(body).__name__}")
    return body


def wants_timeline(request: Request) -> bool:
    """Whether the answer is to tell where its time went."""
    return request.headers.get("x-kvferry-timeline", "").strip() == "1"


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


class WatchedResponse(Response):
    """Runs `respond`, and cancels it as soon as the client goes away.

    Everything of an answer, from its first token to the last byte, happens in the request's own task: cancelling that
    closes the generators below, which aborts the request on its workers.
    """

    def __init__(self, respond: Callable[[Send], Coroutine[Any, Any, Response | None]]) -> None:
        super().__init__()
        self._respond = respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answering = asyncio.current_task()
        assert answering is not None
        watching = asyncio.create_task(_cancel_when_gone(answering, receive))
        try:
            response = await self._respond(send)
            if response is not None:
                await response(scope, receive, send)
        except asyncio.CancelledError:
            if not watching.done() or answering.uncancel():
                raise  # Another than the client's going ends it.
        finally:
            watching.cancel()


async def _cancel_when_gone(answering: asyncio.Task[Any], receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    answering.cancel()


class EventStream:
    """Server-sent events on their way to a client."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False
        self.ended = False

    async def put(self, data: bytes, last: bool = False) -> None:
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": list(_SSE_HEADERS)})
        self.ended = last
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})


async def send_events(send: Send, say: Callable[[EventStream], Awaitable[None]]) -> None:
    """Let `say` put its events. An error before the first is raised, a later one is the last event of the stream."""
    stream = EventStream(send)
    try:
        await say(stream)
    except Exception as error:
        if not stream.started or stream.ended:
            raise
        await stream.put(event(_late_error(error)), last=True)
    if not stream.ended:
        await stream.put(b"", last=True)


def _late_error(error: Exception) -> dict[str, Any]:
    if isinstance(error, KVFerryError):
        return error_body(error)
    logger.exception("an answer failed mid-stream")
    return _internal_error()


def _internal_error() -> dict[str, Any]:
    return error_object("internal error; the server's log has the reason", "server_error")


def error_response(error: KVFerryError) -> JSONResponse:
    return JSONResponse(error_body(error), error.http_status, headers=retry_headers(error.http_status, error))


def retry_headers(status: int, error: KVFerryError | None = None) -> dict[str, str]:
    if status == 409:
        # openai-python sends such a request again by itself, which would take it from where it was sent again.
        return {"x-should-retry": "false"}
    if status not in (429, 503):
        return {}
    wait_s = error.retry_after_s if isinstance(error, OverloadedError) else _RETRY_AFTER_S
    return {"retry-after": str(max(1, math.ceil(wait_s)))}


def add_error_handlers(app: FastAPI) -> None:
    """Every error of the app in OpenAI's shape."""

    async def typed(request: Request, error: Exception) -> Response:
        assert isinstance(error, KVFerryError)
        return error_response(error)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        reason = f"{error.detail}: {request.method} {request.url.path[:200]}"
        return JSONResponse(error_object(reason, "invalid_request_error"), error.status_code, headers=error.headers)

    async def unexpected(request: Request, error: Exception) -> Response:
        # Starlette answers this one outside of the middleware that adds the id.
        return JSONResponse(_internal_error(), 500, headers={"x-request-id": request.state.request_id})

    app.add_exception_handler(KVFerryError, typed)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, unexpected)


class RequestIds:
    """Middleware: the client's X-Request-Id, or a new one, goes to the endpoint and back to the client."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        TRACEPARENT.set(header_of(scope, b"traceparent"))
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        await self._app(scope, receive, send_with_id)


def _request_id(scope: Scope) -> str:
    given = header_of(scope, b"x-request-id")
    if valid_request_id(given):
        return given
    path: str = scope["path"]
    if path.endswith("/responses"):
        return new_request_id("resp", "_")
    return new_request_id("chatcmpl" if path.endswith("/chat/completions") else "cmpl")


def header_of(scope: Scope, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")
