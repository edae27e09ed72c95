"""Whether the router is there, whether it could answer, and its figures."""

from __future__ import annotations

from typing import Protocol

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from router.http.answers import retry_headers
from router.text import TextService


class Readiness(Protocol):
    def ready(self) -> tuple[bool, str]:
        """Whether a request could be answered now, and who is missing."""


def add_probe_routes(app: FastAPI, text: TextService, pool: Readiness) -> None:
    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        is_ready, reason = pool.ready()
        if is_ready:
            return JSONResponse({"status": "ready"} | ({"reason": reason} if reason else {}))
        return JSONResponse({"status": "not ready", "reason": reason}, 503, headers=retry_headers(503))

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(text.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)
