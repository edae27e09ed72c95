"""Spans of a request: who had it and where its time went, whatever happened to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="needs kvferry[otel]")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from cluster.sim.loop import run
from router.spans import Spans
from router.traces import TRACEPARENT
from tests.factories import GREEDY, SimCluster, prompt_of, sim_cluster
from workers.errors import OverloadedError

LONG = replace(GREEDY, max_tokens=40)
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-{}"


def no_time(rng, num_bytes):
    return 0.0


def spans_of(cluster: SimCluster) -> Callable[[], list[ReadableSpan]]:
    """Of what ends from now on."""
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    cluster.router.traces.on_end = Spans(provider.get_tracer("kvferry"), "m").tell
    return lambda: list(exporter.get_finished_spans())


async def until_told(spans: Callable[[], list[ReadableSpan]], number: int = 1) -> dict[str, list[ReadableSpan]]:
    """By name, in their order, once so many requests are there."""
    while sum(span.name == "request" for span in spans()) < number:  # noqa: ASYNC110  It is told soon after.
        await asyncio.sleep(0.001)
    found: dict[str, list[ReadableSpan]] = {}
    for span in sorted(spans(), key=lambda one: one.start_time or 0):
        found.setdefault(span.name, []).append(span)
    return found


def num_tokens(cluster: SimCluster) -> int:
    """Of the first try of the only request."""
    return cluster.router.traces.tell("r")[0].tries[0].num_tokens if cluster.router.num_running else 0


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def about(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def parent_id(span: ReadableSpan) -> int | None:
    return span.parent.span_id if span.parent else None


def own_id(span: ReadableSpan) -> int:
    assert span.context is not None
    found: int = span.context.span_id
    return found


def test_a_request_is_one_tree_whose_phases_are_its_timeline():
    async def main() -> None:
        async with sim_cluster(latency=no_time) as cluster:
            spans = spans_of(cluster)
            outputs = await cluster.outputs(prompt_of(60), LONG)
            timeline = outputs[-1].timeline
            assert timeline is not None
            told = await until_told(spans)
            ((root,), (one,)) = told["request"], told["try"]
            assert (root.kind, root.parent, parent_id(one)) == (SpanKind.SERVER, None, own_id(root))
            phases = [name for name in told if name not in ("request", "try")]
            assert {parent_id(told[name][0]) for name in phases} == {own_id(one)}
            assert {len(told[name]) for name in phases} == {1}
            for name in ("prefill", "decode", "transfer"):
                assert seconds(told[name][0]) == pytest.approx(getattr(timeline, f"{name}_s"), abs=1e-6)
            assert seconds(root) == pytest.approx(timeline.total_s, abs=1e-6)
            assert (about(told["prefill"][0])["kvferry.worker"], about(told["decode"][0])["kvferry.worker"]) == (
                "p0",
                "d0",
            )
            # The transfer overlaps prefill, and is over when decode begins.
            transfer, prefill, decode = (told[name][0] for name in ("transfer", "prefill", "decode"))
            assert (transfer.start_time or 0) < (prefill.end_time or 0) < (transfer.end_time or 0)
            assert (transfer.end_time or 0) <= (decode.start_time or 0)
            assert about(root)["gen_ai.usage.output_tokens"] == 40
            assert root.status.status_code is StatusCode.UNSET

    run(main())


def test_each_try_has_its_own_phases_and_its_error():
    async def main() -> None:
        async with sim_cluster(decode=2) as cluster:
            spans = spans_of(cluster)
            asked = asyncio.create_task(cluster.ask(prompt_of(10), replace(GREEDY, max_tokens=60)))
            while num_tokens(cluster) < 20:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            first = cluster.router.traces.tell("r")[0].tries[0].decode
            await cluster.kill(first)
            await asked
            told = await until_told(spans)
            failed, good = told["try"]
            assert (failed.status.status_code, good.status.status_code) == (StatusCode.ERROR, StatusCode.UNSET)
            assert about(failed)["kvferry.decode_worker"] == first != about(good)["kvferry.decode_worker"]
            assert [about(span)["kvferry.try"] for span in (failed, good)] == [1, 2]
            assert [about(span)["kvferry.worker"] for span in told["decode"]] == [
                first,
                about(good)["kvferry.decode_worker"],
            ]
            # It went well in the end.
            assert told["request"][0].status.status_code is StatusCode.UNSET

    run(main())


def test_a_request_that_fails_says_why():
    async def main() -> None:
        async with sim_cluster(router={"max_num_queued_reqs": 1, "worker_wait_s": 5}) as cluster:
            spans = spans_of(cluster)
            await cluster.kill("p0")
            await cluster.kill("d0")
            waiting = asyncio.create_task(cluster.ask(prompt_of(10), request_id="waits"))
            await asyncio.sleep(1)
            with pytest.raises(OverloadedError):
                await cluster.ask(prompt_of(10), request_id="refused")
            (root,) = (await until_told(spans))["request"]
            assert root.status.status_code is StatusCode.ERROR
            assert "OverloadedError" in (root.status.description or "")
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await cluster.replace("p0")
            await cluster.replace("d0")

    run(main())


def test_an_answer_that_its_reader_closes_is_decode_until_then_and_no_error():
    async def main() -> None:
        async with sim_cluster(latency=no_time) as cluster:
            spans = spans_of(cluster)
            async with aclosing(cluster.router.generate(prompt_of(10), LONG, "r")) as stream:
                async for output in stream:
                    if output.index >= 20:
                        break
            told = await until_told(spans)
            (root,), (decode,) = told["request"], told["decode"]
            assert root.status.status_code is StatusCode.UNSET
            assert decode.end_time == root.end_time
            assert seconds(decode) > 0.5 * seconds(root)

    run(main())


def test_the_answer_does_not_wait_for_its_spans():
    async def main() -> None:
        async with sim_cluster() as cluster:
            spans = spans_of(cluster)
            async with aclosing(cluster.router.generate(prompt_of(10), GREEDY, "r")) as stream:
                async for _ in stream:
                    pass
            assert cluster.router.traces.tell("r")[0].outcome == "length"
            assert spans() == []
            await until_told(spans)

    run(main())


@pytest.mark.parametrize(("flags", "is_told"), [("01", True), ("00", False)])
def test_a_client_that_traces_itself_decides_whether_and_where(flags, is_told):
    async def main() -> None:
        async with sim_cluster() as cluster:
            spans = spans_of(cluster)
            TRACEPARENT.set(PARENT.format(flags))
            await cluster.ask(prompt_of(10), request_id="theirs")
            TRACEPARENT.set("")
            await cluster.ask(prompt_of(10), request_id="ours")
            told = await until_told(spans, 1 + is_told)
            roots = {about(span)["kvferry.request_id"]: span for span in told["request"]}
            assert set(roots) == ({"ours", "theirs"} if is_told else {"ours"})
            assert roots["ours"].parent is None
            if is_told:
                assert f"{parent_id(roots['theirs']):016x}" == "b7ad6b7169203331"
                assert roots["theirs"].context is not None
                assert f"{roots['theirs'].context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"

    run(main())


@pytest.mark.parametrize("nonsense", ["", "00-zz", "\x00", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_a_traceparent_that_is_none_is_left_alone(nonsense):
    async def main() -> None:
        async with sim_cluster() as cluster:
            spans = spans_of(cluster)
            TRACEPARENT.set(nonsense)
            await cluster.ask(prompt_of(10))
            assert (await until_told(spans))["request"][0].parent is None

    run(main())
