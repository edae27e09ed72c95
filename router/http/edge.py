"""What an HTTP request passes before it comes to its route: whose it is, and how large and slow its body may be."""

from __future__ import annotations

import asyncio
import sys

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.config import RouterConfig
from router.http.answers import RequestIds, error_response, header_of
from router.tenants import CALLER, KeyRing
from router.ui.access import key_header, refusal
from workers.errors import AbortedError, KVFerryError

# Probes come without a key.
_OPEN_PATHS = ("/health", "/ready")
# Uploads have another limit (router/batches/files.py).
_UPLOADS = "/v1/files"


def add_edge(app: FastAPI, config: RouterConfig, keys: KeyRing | None) -> None:
    """The last that is added is the first that a request meets."""
    app.add_middleware(BodyLimits, max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s)
    if keys is not None:
        app.add_middleware(Keys, keys=keys)
    app.add_middleware(RequestIds)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["*"],
        )


class Keys:
    """Lets in who has a key, and only as often as that allows."""

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            caller = self._keys.caller(key_header(scope["path"], header_of(scope, b"authorization")))
        except KVFerryError as error:
            await refusal(scope["path"], error)(scope, receive, send)
            return

        async def send_with_rates(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *caller.rate_headers()]
            await send(message)

        try:
            if scope["method"] == "POST":
                caller.take_request()
        except KVFerryError as error:
            await error_response(error)(scope, receive, send_with_rates)
            return
        CALLER.set(caller)
        await self._app(scope, receive, send_with_rates)


class BodyLimits:
    """Bodies that are too large are refused before they are read, as far as that can be known; slow ones are left."""

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = header_of(scope, b"content-length")
        is_upload = scope["path"] == _UPLOADS
        body = _Body(receive, sys.maxsize if is_upload else self._max_bytes, self._timeout_s, length, is_upload)
        # One without a body is whole as it is.
        body.whole = length in ("", "0") and not header_of(scope, b"transfer-encoding")

        async def send_and_close(message: Message) -> None:
            if message["type"] == "http.response.start" and not body.whole:
                # The rest of it must not be taken for the next request.
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        await self._app(scope, body.receive, send_and_close)


class _Body:
    """The body of one request on its way in."""

    def __init__(
        self, receive: Receive, max_bytes: int, timeout_s: float, content_length: str, is_upload: bool
    ) -> None:
        """All of it has to come within timeout_s; of an upload, which may be large, something each timeout_s."""
        self._receive = receive
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._length = int(content_length) if content_length.isdecimal() else 0
        self._num_bytes = 0
        self._is_upload = is_upload
        self._deadline_s = _now() + timeout_s
        self.whole = False

    async def receive(self) -> Message:
        """Raises HTTPException 413 or 408, and AbortedError when the client goes away before all of it has come."""
        if self.whole:
            return await self._receive()
        if self._length > self._max_bytes:
            raise self._too_large()
        if self._is_upload:
            self._deadline_s = _now() + self._timeout_s
        try:
            async with asyncio.timeout_at(self._deadline_s):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(408, f"the body did not come within {self._timeout_s:g} s; send it again") from None
        if message["type"] == "http.disconnect":
            raise AbortedError("the client went away before its request was whole")
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._max_bytes:
            raise self._too_large()
        self.whole = not message.get("more_body", False)
        return message

    def _too_large(self) -> HTTPException:
        return HTTPException(413, f"the body is over {self._max_bytes} bytes (router.max_body_bytes); send less")


def _now() -> float:
    return asyncio.get_running_loop().time()
