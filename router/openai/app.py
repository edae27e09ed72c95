"""The OpenAI HTTP API over a TextService: which file answers which path."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from router.config import RouterConfig
from router.http.answers import add_error_handlers
from router.http.edge import add_edge
from router.openai.chat import add_chat_routes
from router.openai.completions import add_completion_routes
from router.openai.models import add_model_routes
from router.openai.probes import Readiness, add_probe_routes
from router.openai.responses import add_response_routes
from router.openai.tokens import add_token_routes
from router.openai.tool_syntax import tool_syntax
from router.tenants import KeyRing
from router.text import TextService

_DEFAULTS = RouterConfig()
# FastAPI's own, which looks for OpenTelemetry's providers with every request: our figures are in router/metrics.py.
_NO_TELEMETRY: Any = {"tracing": False, "metrics": False, "logs": False}


def build_app(
    text: TextService, pool: Readiness, config: RouterConfig = _DEFAULTS, keys: KeyRing | None = None
) -> FastAPI:
    app = FastAPI(
        title="kvferry",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        telemetry=_NO_TELEMETRY,
    )
    add_edge(app, config, keys)
    add_error_handlers(app)
    syntax = tool_syntax(config.tool_call_parser, text.tokenizer.chat_template)
    add_completion_routes(app, text)
    add_chat_routes(app, text, syntax)
    add_response_routes(app, text, syntax)
    add_model_routes(app, text)
    add_token_routes(app, text)
    add_probe_routes(app, text, pool)
    return app
