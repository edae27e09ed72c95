"""Whether the router is there, whether it could answer, its figures, and where its workers have theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from protos import router_pb2
from router.http.answers import retry_headers
from router.text import TextService


class Readiness(Protocol):
    def ready(self) -> tuple[bool, str]:
        """Whether a request could be answered now, and who is missing."""

    def status(self) -> Sequence[router_pb2.WorkerStatus]: ...


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

    @app.get("/metrics/targets")
    async def targets(request: Request) -> Response:
        """In the form of Prometheus' http_sd_configs."""
        heard = [worker.stats for worker in pool.status() if worker.stats.metrics_address]
        return JSONResponse(
            [
                {
                    "targets": [stats.metrics_address],
                    "labels": {
                        # Workers speak TLS where routers do.
                        "__scheme__": request.url.scheme,
                        "__meta_kvferry_worker": stats.name,
                        "__meta_kvferry_role": stats.role,
                    },
                }
                for stats in heard
            ]
        )
