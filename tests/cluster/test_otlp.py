"""Traces of a whole router reach a collector, as the client's where it sent a traceparent."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import grpc.aio
import pytest

pytest.importorskip("opentelemetry.sdk", reason="needs kvferry[otel]")

from opentelemetry.proto.trace.v1.trace_pb2 import Span

from cluster.check import examine
from cluster.config import parse_config
from cluster.otlp import tracer_provider
from protos import router_pb2, router_pb2_grpc
from router.spans import Spans
from tests.cluster.otlp_receiver import receiving
from tests.router.whole import GOOD, whole_router
from workers.errors import ConfigError

PARENTS = {
    protocol: f"00-{digit * 32}-{digit * 16}-01" for protocol, digit in (("http", "a"), ("grpc", "b"), ("none", ""))
}


def test_a_collector_gets_one_tree_a_request_below_its_clients_span():
    async def main(endpoint: str) -> None:
        async with whole_router() as whole:
            provider = tracer_provider(endpoint, "router-0", "test")
            whole.serving.router.traces.on_end = Spans(provider.get_tracer("kvferry"), "smol").tell
            async with whole.client() as client:
                for headers in ({"traceparent": PARENTS["http"]}, {}):
                    answer = await client.post("/v1/completions", json=GOOD, headers=headers)
                    assert answer.status_code == 200
                streamed = await client.post("/v1/completions", json={**GOOD, "stream": True}, headers=headers)
                assert streamed.status_code == 200
            async with grpc.aio.insecure_channel(whole.grpc_target) as channel:
                request = router_pb2.GenerateRequest(text="Hello", params={"max_tokens": 4})
                stub = router_pb2_grpc.RouterServiceStub(channel)
                async for _ in stub.Generate(request, metadata=(("traceparent", PARENTS["grpc"]),)):
                    pass
            await whole.until_idle()
            await asyncio.to_thread(provider.shutdown)

    with receiving() as receiver:
        asyncio.run(main(receiver.endpoint))
    spans = receiver.spans()
    assert receiver.resource()["service.name"] == "kvferry"
    assert receiver.resource()["service.instance.id"] == "router-0"
    roots = [span for span in spans if span.name == "request"]
    assert [parent_of(root) for root in roots] == [PARENTS["http"], "", "", PARENTS["grpc"]]
    for root in roots:
        assert names_below(root, spans) >= {"try", "queued", "prefill", "transfer", "decode"}
    assert sum(map(len, (names_below(root, spans) for root in roots))) == len(spans) - len(roots)


def parent_of(span: Span) -> str:
    return f"00-{span.trace_id.hex()}-{span.parent_span_id.hex()}-01" if span.parent_span_id else ""


def names_below(root: Span, spans: list[Span]) -> set[str]:
    """AssertionError when a span is there twice, or lies outside its parent."""
    own = [span for span in spans if span.trace_id == root.trace_id and span is not root]
    by_id = {span.span_id: span for span in (root, *own)}
    for span in own:
        parent = by_id[span.parent_span_id]
        assert parent.start_time_unix_nano <= span.start_time_unix_nano + 1000
        assert span.end_time_unix_nano <= parent.end_time_unix_nano + 1000
    names = [span.name for span in own]
    assert len(set(names)) == len(names)
    return set(names)


def test_without_the_extra_it_is_refused_before_anything_starts(monkeypatch):
    config = parse_config("telemetry: {otlp_endpoint: 'http://localhost:4318'}", "a.yaml")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    problems = examine(config, lambda model: Path("."), with_torch=False).problems
    (problem,) = [problem for problem in problems if problem.key.startswith("telemetry")]
    assert "pip install 'kvferry[otel]'" in problem.message


@pytest.mark.parametrize("endpoint", ["localhost:4318", "grpc://localhost:4317", "http://", "http://h:1/?a=b"])
def test_what_is_no_collectors_address_is_refused_by_its_key(endpoint):
    with pytest.raises(ConfigError) as raised:
        parse_config(f"telemetry: {{otlp_endpoint: '{endpoint}'}}", "a.yaml")
    assert "otlp_endpoint" in raised.value.message
    assert "http://localhost:4318" in raised.value.message
