"""Traces to an OpenTelemetry collector (telemetry.otlp_endpoint), by the SDK's own thread."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from workers.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

# What a collector that does not answer costs at the end of a process.
_EXPORT_TIMEOUT_S = 5.0
# Of some 4,000 requests: the SDK's own 2,048 spans are those of 250, which a router has in a second.
_MAX_SPANS, _MAX_BATCH, _PERIOD_S = 1 << 15, 1 << 11, 1.0


def require_otel() -> None:
    """Raises ConfigError where kvferry[otel] is not installed."""
    if find_spec("opentelemetry.sdk") is None or find_spec("opentelemetry.exporter") is None:
        raise ConfigError(
            "telemetry.otlp_endpoint needs OpenTelemetry: pip install 'kvferry[otel]', or set it to null",
            param="telemetry.otlp_endpoint",
        )


def tracer_provider(endpoint: str, router: str, cluster: str) -> TracerProvider:
    """Spans in batches, dropped where the collector is slower than they come."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    about = {"service.name": "kvferry", "service.namespace": cluster, "service.instance.id": router}
    provider = TracerProvider(resource=Resource.create(about))
    exporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=_EXPORT_TIMEOUT_S)
    provider.add_span_processor(
        BatchSpanProcessor(
            exporter,
            max_queue_size=_MAX_SPANS,
            schedule_delay_millis=_PERIOD_S * 1000,
            max_export_batch_size=_MAX_BATCH,
        )
    )
    return provider
