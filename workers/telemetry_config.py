"""What a cluster tells of itself, and where."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from workers.strict import Strict

LogFormat = Literal["text", "json"]


class TelemetryConfig(Strict):
    log_format: LogFormat = "text"
    """Of each process's log file. json: one object a line; what native code prints goes to NAME.log.out beside it."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Where each worker serves its own /metrics: the first free port of its host from this one on. 0: any; null:
    nowhere, since every router's /metrics tells of all workers. Routers list them all at /metrics/targets."""
    vllm_metrics: bool = False
    """Whether routers' /metrics has the core metrics under vLLM's names (vllm:...) too, for boards and gateways that
    look for these."""
    otlp_endpoint: str | None = None
    """An OpenTelemetry collector, http://host:4318: each request's trace is sent to its /v1/traces (OTLP over HTTP);
    needs kvferry[otel]. null: nowhere."""

    @field_validator("otlp_endpoint")
    @classmethod
    def _is_a_url(cls, endpoint: str | None) -> str | None:
        if endpoint is not None:
            parts = urlsplit(endpoint)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
                raise ValueError(f"{endpoint!r} is no address of a collector; give one like http://localhost:4318")
        return endpoint
