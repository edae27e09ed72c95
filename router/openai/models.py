"""/v1/models: the names served, each a model to clients; and the server's version."""

from __future__ import annotations

import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import FastAPI
from starlette.responses import JSONResponse, Response

from router.text import TextService


def add_model_routes(app: FastAPI, text: TextService) -> None:
    created = int(time.time())

    def card(name: str) -> dict[str, Any]:
        limit = text.max_model_len
        return {"id": name, "object": "model", "created": created, "owned_by": "kvferry", "max_model_len": limit}

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [card(name) for name in text.served_model_names]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return JSONResponse(card(text.model_name(name)))

    @app.get("/version")
    async def version_() -> Response:
        return JSONResponse({"version": _version()})


def _version() -> str:
    try:
        return version("kvferry")
    except PackageNotFoundError:  # Run from a tree that is not installed.
        return "unknown"
