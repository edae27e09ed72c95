"""/ui: a page that shows the cluster at work, and /ui/state, which it asks once a second."""

from __future__ import annotations

import asyncio
import mimetypes
from collections.abc import Callable
from importlib.resources import files

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, RedirectResponse, Response

from protos import router_pb2
from router.activity import activity_of, visible_tenant
from router.traces import Traces
from router.ui.state import cluster_object, requests_object

# Nothing of the page comes from elsewhere, goes elsewhere, or is shown within another's.
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
# With many workers their status is the larger part of the work; it changes with their heartbeats.
_STATUS_AGE_S = 0.5


def add_ui_routes(app: FastAPI, status: Callable[[], router_pb2.GetStatusResponse], traces: Traces) -> None:
    page = {file.name: file.read_bytes() for file in (files("router.ui") / "page").iterdir()}
    cluster = _Latest(lambda: cluster_object(status()))

    @app.get("/ui")
    async def ui() -> Response:
        # Relative: whoever stands before the router may have put it below another path.
        return RedirectResponse("ui/", 307)

    @app.get("/ui/state")
    async def state() -> Response:
        requests = requests_object(activity_of(traces, visible_tenant()))
        return JSONResponse(cluster.get() | requests, headers={"cache-control": "no-store"})

    @app.get("/ui/{name:path}")
    async def file(name: str) -> Response:
        name = name or "index.html"
        if name not in page:
            raise HTTPException(404, "Not Found")
        kind = mimetypes.guess_type(name)[0]
        return Response(page[name], media_type=kind, headers=_HEADERS)


class _Latest:
    """What is the same for all who look, made at most twice a second."""

    def __init__(self, make: Callable[[], dict[str, object]]) -> None:
        self._make = make
        self._made: dict[str, object] = {}
        self._until_s = 0.0

    def get(self) -> dict[str, object]:
        now_s = asyncio.get_running_loop().time()
        if not self._made or now_s >= self._until_s:
            self._made, self._until_s = self._make(), now_s + _STATUS_AGE_S
        return self._made
