"""OpenTelemetry spans of a request, made of its trace when it has ended: who had it, and where its time went.

One trace a request, the client's own where it sent a `traceparent`: a span of the router, below it one for each try,
and below that the phases of the try, with the worker of each. Times are those of `kvferry trace`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from router.traces import Trace, Try
from workers.timeline import Timeline

_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Phase:
    """Seconds from its try's begin; the worker is empty while the router has the request."""

    name: str
    begin_s: float
    end_s: float
    worker: str = ""


class Spans:
    def __init__(self, tracer: Tracer, model_name: str) -> None:
        self._tracer = tracer
        self._model_name = model_name
        self._read_parent = TraceContextTextMapPropagator().extract

    def tell(self, trace: Trace) -> None:
        """Of a trace that has ended."""
        unix_s = trace.arrived_unix_s - trace.began_s
        parent = self._read_parent({"traceparent": trace.traceparent}) if trace.traceparent else None
        root = self._tracer.start_span(
            "request", parent, SpanKind.SERVER, self._attributes(trace), start_time=_ns(unix_s + trace.began_s)
        )
        if root.is_recording():
            for number, one in enumerate(trace.tries, start=1 + trace.num_tries - len(trace.tries)):
                self._tell_try(root, number, one, unix_s)
        if trace.failed:
            root.set_status(Status(StatusCode.ERROR, trace.outcome))
        root.end(_ns(unix_s + (trace.ended_s or trace.began_s)))

    def _tell_try(self, root: Span, number: int, one: Try, unix_s: float) -> None:
        began_s = unix_s + one.began_s
        attributes: dict[str, AttributeValue] = {
            "kvferry.try": number,
            "kvferry.choices": one.choices,
            "kvferry.prefill_worker": one.prefill,
            "kvferry.decode_worker": one.decode,
            "gen_ai.usage.output_tokens": one.num_tokens,
        }
        span = self._tracer.start_span("try", set_span_in_context(root), attributes=attributes, start_time=_ns(began_s))
        within = set_span_in_context(span)
        for phase in phases_of(one):
            about = {"kvferry.worker": phase.worker} if phase.worker else {}
            child = self._tracer.start_span(
                phase.name, within, attributes=about, start_time=_ns(began_s + phase.begin_s)
            )
            child.end(_ns(began_s + phase.end_s))
        if one.error:
            span.set_status(Status(StatusCode.ERROR, one.error))
        span.end(_ns(unix_s + (one.ended_s or one.began_s)))

    def _attributes(self, trace: Trace) -> dict[str, str | int]:
        return {
            "gen_ai.operation.name": "generate",
            "gen_ai.request.model": self._model_name,
            "gen_ai.usage.input_tokens": trace.num_prompt_tokens,
            "gen_ai.usage.output_tokens": sum(one.num_tokens for one in trace.tries),
            "kvferry.request_id": trace.request_id,
            "kvferry.num_tries": trace.num_tries,
            "kvferry.outcome": trace.outcome,
        }


def phases_of(one: Try) -> Iterator[Phase]:
    """One after the other, but for the transfer, which ends with what of it prefill did not hide."""
    told = max(one.told.values(), key=lambda timeline: timeline.total_s, default=Timeline())
    at_s = told.queued_s
    yield Phase("queued", 0.0, at_s)
    if told.prefill_queued_s:
        yield Phase("prefill_queued", at_s, at_s + told.prefill_queued_s, one.prefill)
    at_s += told.prefill_queued_s
    if told.prefill_s:
        yield Phase("prefill", at_s, at_s + told.prefill_s, one.prefill)
    at_s += told.prefill_s + told.transfer_unhidden_s
    if told.transfer_s:
        yield Phase("transfer", at_s - told.transfer_s, at_s, one.prefill)
    if told.decode_queued_s:
        yield Phase("decode_queued", at_s, at_s + told.decode_queued_s, one.decode)
    at_s += told.decode_queued_s
    decode_s = told.decode_s
    if one.heard and not one.finished and not one.error:
        # Its reader closed it, so that its worker told no end.
        decode_s = max(decode_s, (one.ended_s or one.began_s) - one.began_s - at_s)
    if decode_s:
        yield Phase("decode", at_s, at_s + decode_s, one.decode)


def _ns(unix_s: float) -> int:
    return int(unix_s * _NS)
