"""What a router tells of the latest requests and their latencies."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from cluster.sim.loop import run, virtual_loop
from protos import router_pb2
from router.activity import MAX_SHOWN, activity_of
from router.traces import Trace, Traces
from tests.factories import GREEDY, prompt_of, sim_cluster
from tests.router.test_timeline import complete
from workers.request import TokenOutput


def ended(traces: Traces, name: str, ttft_s: float, tpot_s: float, at_s: float, tenant: str = "") -> Trace:
    """A request of five tokens that ended then."""
    trace = traces.begin(name, 7, at_s - ttft_s - 4 * tpot_s, tenant)
    one = trace.begin([0], trace.began_s)
    for index in range(5):
        one.hear(TokenOutput(name, index, (1,)))
    trace.token_1_s = trace.began_s + ttft_s
    traces.end(trace, "length", at_s)
    return trace


def told(traces: Traces, tenant: str | None = None, after_s: float = 0.0) -> router_pb2.GetActivityResponse:
    async def main() -> router_pb2.GetActivityResponse:
        await asyncio.sleep(after_s)
        return activity_of(traces, tenant)

    return run(main())


@pytest.mark.parametrize("count", [1, 2, 3, 99, 100, 101, 500])
def test_percentiles_are_those_of_numpy(count):
    rng, traces = random.Random(count), Traces(1000)
    values = [(rng.uniform(0.01, 2), rng.uniform(0.001, 0.2)) for _ in range(count)]
    for at, (ttft_s, tpot_s) in enumerate(values):
        ended(traces, f"r{at}", ttft_s, tpot_s, at_s=0.0)
    activity = told(traces)
    for spread, column in ((activity.ttft, 0), (activity.tpot, 1)):
        expected = np.percentile([value[column] for value in values], [50, 99], method="inverted_cdf")
        assert spread.count == count
        assert [spread.p50_s, spread.p99_s] == pytest.approx(expected)


def test_latencies_are_of_the_last_minute():
    traces = Traces(1000)
    ended(traces, "then", 5.0, 0.5, at_s=0.0)
    ended(traces, "lately", 0.1, 0.01, at_s=50.0)
    activity = told(traces, after_s=70.0)
    assert (activity.ttft.count, activity.tpot.count) == (1, 1)
    assert (activity.ttft.p99_s, activity.tpot.p99_s) == pytest.approx((0.1, 0.01))
    assert len(activity.traces) == 2


def test_what_it_tells_is_bounded_and_what_runs_has_no_more_than_its_share():
    traces = Traces(1000)
    for at in range(300):
        ended(traces, f"e{at}", 0.1, 0.01, at_s=float(at))
    assert [trace.request_id for trace in told(traces).traces] == [f"e{at}" for at in range(299, 219, -1)]
    for at in range(200):
        traces.begin(f"r{at}", 1, 300.0 + at)
    shown = [trace.request_id for trace in told(traces, after_s=600.0).traces]
    assert len(shown) == MAX_SHOWN
    assert shown == [f"r{at}" for at in range(199, 139, -1)] + [f"e{at}" for at in range(299, 279, -1)]


def test_a_tenant_is_told_of_its_own_alone():
    traces = Traces(10)
    for tenant, ttft_s in (("a", 1.0), ("b", 3.0)):
        ended(traces, f"of-{tenant}", ttft_s, 0.1, at_s=0.0, tenant=tenant)
        traces.begin(f"now-{tenant}", 1, 0.0, tenant)
    for tenant, ttft_s in (("a", 1.0), ("b", 3.0)):
        activity = told(traces, tenant)
        assert {trace.request_id for trace in activity.traces} == {f"of-{tenant}", f"now-{tenant}"}
        assert activity.ttft.count == 1
        assert activity.ttft.p50_s == pytest.approx(ttft_s)
    assert len(told(traces).traces) == 4


def test_times_of_a_trace_are_what_its_client_was_told():
    async def main() -> None:
        async with sim_cluster(1, 1) as cluster:
            chunks, passed_s = await complete(cluster, prompt_of(40))
            (trace,) = activity_of(cluster.router.traces, None).traces
            last = chunks[-1]
            # Text is a moment later there than its tokens.
            assert trace.ttft_s == pytest.approx(last.ttft_s, abs=1e-6)
            assert trace.tpot_s == pytest.approx(last.tpot_s, abs=1e-6)
            assert trace.num_tokens == last.num_completion_tokens
            assert trace.elapsed_s == pytest.approx(passed_s, abs=1e-6)

    run(main())


def test_a_request_without_a_token_has_no_times():
    async def main() -> None:
        async with sim_cluster(1, 0) as cluster:
            asking = asyncio.create_task(cluster.ask(prompt_of(10), GREEDY, "first"))
            await asyncio.sleep(0.0001)
            assert virtual_loop().time() < 1
            (trace,) = activity_of(cluster.router.traces, None).traces
            assert not trace.HasField("ttft_s")
            assert not trace.HasField("tpot_s")
            await asking
            (trace,) = activity_of(cluster.router.traces, None).traces
            assert trace.ttft_s > 0
            assert trace.tpot_s > 0

    run(main())
