"""What is predicted of a request's times is what happens to it, on simulated clusters of which nothing is known yet."""

from __future__ import annotations

import asyncio
import math
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import pytest

from cluster.sim.loop import run, virtual_loop
from router.prediction import DecodeLoad, Fit, Line, PrefillLoad, tpot_s, ttft_s
from tests.factories import GREEDY, SimCluster, make_request, prompt_of, sim_cluster
from workers.errors import OverloadedError
from workers.request import NO_TERMS, Request, Slo, Terms

# A step of 256 tokens takes 31 ms: 8,300 prompt tokens a second and worker.
BIG: dict[str, Any] = {
    "num_gpu_blocks_override": 6000,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 256,
    "max_model_len": 1024,
    "transfer": {"frame_bytes": 1 << 20},
}
LINE = Line(0.01, 0.0001)


@dataclass
class Times:
    ttft_s: float
    tpot_s: float


async def ask(
    cluster: SimCluster, num_tokens: int, name: str, terms: Terms = NO_TERMS, max_tokens: int = 8, n: int = 1
) -> Times:
    params, began_s, first_s = replace(GREEDY, max_tokens=max_tokens, n=n), virtual_loop().time(), 0.0
    async with aclosing(cluster.router.generate(prompt_of(num_tokens), params, name, terms=terms)) as outputs:
        async for _ in outputs:
            first_s = first_s or virtual_loop().time()
    return Times(first_s - began_s, (virtual_loop().time() - first_s) / (max_tokens - 1))


async def crowd(
    cluster: SimCluster, per_s: float, seconds: float, terms: Terms = NO_TERMS, max_tokens: int = 8
) -> list[Times | BaseException]:
    """Prompts of 50 to 550 tokens at random times."""
    rng, end_s = virtual_loop().random, virtual_loop().time() + seconds
    tasks: list[asyncio.Task[Times]] = []
    while virtual_loop().time() < end_s:
        await asyncio.sleep(rng.expovariate(per_s))
        name = f"{per_s} {len(tasks)}"
        tasks.append(asyncio.create_task(ask(cluster, rng.randrange(50, 550), name, terms, max_tokens)))
    return await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(
    ("num_prefill", "num_blocks", "max_tokens", "per_s", "limit_s"),
    [(1, 6000, 8, 14, 0.4), (2, 6000, 8, 28, 0.4), (1, 500, 60, 8, 1.0)],
    ids=["one prefill worker", "two prefill workers", "decode has room for six"],
)
def test_most_of_what_is_predicted_to_miss_would_and_most_of_what_is_admitted_meets_it(
    num_prefill, num_blocks, max_tokens, per_s, limit_s, monkeypatch
):
    """Everybody is let in, at half and then at twice the rate that can be served: what would be refused is seen too."""

    async def main() -> None:
        async with sim_cluster(num_prefill, **BIG | {"num_gpu_blocks_override": num_blocks}) as cluster:
            admission = cluster.router._admission
            predicted_s: list[float | None] = []

            def note(request: Request, num_before: int, num_queued: int) -> None:
                predicted_s.append(admission._forecast.ttft_s(request, num_before, num_queued))

            monkeypatch.setattr(admission._forecast, "require_slo", note)
            results = await crowd(cluster, per_s, 2.0, max_tokens=max_tokens)
            results += await crowd(cluster, 4 * per_s, 2.5, max_tokens=max_tokens)
            # The queue is asked in the order of arrival.
            pairs = [
                (forecast_s, times.ttft_s)
                for forecast_s, times in zip(predicted_s, results, strict=True)
                if isinstance(times, Times) and forecast_s is not None
            ]
            refused = [actual_s > limit_s for forecast_s, actual_s in pairs if forecast_s > limit_s]
            admitted = [actual_s <= limit_s for forecast_s, actual_s in pairs if forecast_s <= limit_s]
            assert len(refused) > 30
            assert len(admitted) > 20
            assert sum(refused) > 0.95 * len(refused)
            assert sum(admitted) > 0.85 * len(admitted)

    run(main())


def test_under_overload_what_is_admitted_meets_its_slo_and_no_capacity_is_wasted():
    terms = Terms(slo=Slo(ttft_ms=400))

    async def main() -> None:
        async with sim_cluster(**BIG) as cluster:
            began = cluster.workers["p0"].engine.num_prompt_tokens_computed
            results = await crowd(cluster, per_s=84, seconds=4.0, terms=terms)
            refused = [r for r in results if isinstance(r, OverloadedError)]
            answered = [r for r in results if isinstance(r, Times)]
            assert len(refused) + len(answered) == len(results)
            assert {error.code for error in refused} == {"slo_unattainable"}
            assert all(0 < error.retry_after_s < 5 for error in refused)
            assert sum(times.ttft_s <= 0.4 for times in answered) > 0.9 * len(answered)
            # Of the 8,300 tokens a second that a prefill worker can do.
            num_tokens = cluster.workers["p0"].engine.num_prompt_tokens_computed - began
            assert num_tokens > 0.8 * 8300 * 4.0

    run(main())


def test_after_the_time_that_it_was_told_to_wait_it_is_admitted():
    async def main() -> None:
        async with sim_cluster(**BIG) as cluster:
            warm = [asyncio.create_task(ask(cluster, 100 + 40 * i, f"w{i}")) for i in range(8)]
            await asyncio.gather(*warm)
            burst = [asyncio.create_task(ask(cluster, 500, f"b{i}")) for i in range(36)]
            await asyncio.sleep(0.01)
            with pytest.raises(OverloadedError) as caught:
                await ask(cluster, 100, "early", Terms(slo=Slo(ttft_ms=300)))
            # HTTP tells whole seconds.
            await asyncio.sleep(wait_s := math.ceil(caught.value.retry_after_s))
            assert 1 < wait_s < 3
            assert (await ask(cluster, 100, "again", Terms(slo=Slo(ttft_ms=300)))).ttft_s <= 0.3
            await asyncio.gather(*burst)

    run(main())


def test_a_tpot_that_the_running_batch_cannot_keep_is_refused_and_one_that_it_can_is_kept():
    async def main() -> None:
        # A decode step of 20 answers takes 25 ms.
        step_s = lambda batch: 0.005 + 0.001 * len(batch.requests)  # noqa: E731
        async with sim_cluster(step_s=step_s, **BIG) as cluster:
            running = [asyncio.create_task(ask(cluster, 10, f"r{i}", max_tokens=150)) for i in range(20)]
            await asyncio.sleep(2.6)
            with pytest.raises(OverloadedError, match=r"slo\.tpot_ms is 20") as caught:
                await ask(cluster, 10, "quick", Terms(slo=Slo(tpot_ms=20)))
            assert 0 < caught.value.retry_after_s < 5
            assert (await ask(cluster, 10, "slow", Terms(slo=Slo(tpot_ms=30)))).tpot_s < 0.03
            await asyncio.gather(*running)
            await asyncio.sleep(1)
            assert (await ask(cluster, 10, "quick", Terms(slo=Slo(tpot_ms=20)))).tpot_s < 0.02

    run(main())


def test_the_routers_slo_holds_for_those_that_name_none():
    async def main() -> None:
        async with sim_cluster(router={"slo": {"ttft_ms": 10}}, **BIG) as cluster:
            # Nothing is measured yet, so nothing is refused.
            assert (await ask(cluster, 400, "cold")).ttft_s > 0.01
            await asyncio.gather(*(ask(cluster, 100 * i, f"w{i}", Terms(slo=Slo(ttft_ms=9e9))) for i in range(1, 6)))
            with pytest.raises(OverloadedError, match=r"slo\.ttft_ms is 10"):
                await ask(cluster, 400, "warm")
            await ask(cluster, 400, "patient", Terms(slo=Slo(ttft_ms=1000)))

    run(main())


def test_urgent_requests_are_not_foretold_the_wait_of_jobs():
    async def main() -> None:
        async with sim_cluster(**BIG) as cluster:
            await asyncio.gather(*(ask(cluster, 100 * i, f"w{i}") for i in range(1, 9)))
            jobs = [asyncio.create_task(ask(cluster, 500, f"j{i}", Terms(priority=100))) for i in range(30)]
            await asyncio.sleep(0.3)
            slo = Slo(ttft_ms=500)
            with pytest.raises(OverloadedError):
                await ask(cluster, 100, "late", Terms(priority=100, slo=slo))
            assert (await ask(cluster, 100, "urgent", Terms(slo=slo))).ttft_s < 0.5
            await asyncio.gather(*jobs)

    run(main())


@pytest.mark.parametrize("base_s", [0.0, 0.02])
@pytest.mark.parametrize("slope_s", [0.0, 0.0003])
def test_a_fit_finds_the_line_and_forgets_what_was(base_s, slope_s):
    fit = Fit()
    for i in range(50):
        fit.add(i, 100.0, 0.0)
    for i in range(200):
        fit.add(i % 17, base_s + slope_s * (i % 17), 300.0 + i)
    line = fit.line(500.0)
    assert line is not None
    assert line.base_s == pytest.approx(base_s, abs=1e-4)
    assert line.slope_s == pytest.approx(slope_s, abs=1e-5)
    assert fit.line(700.0) is None


def test_a_fit_of_equal_samples_is_a_proportion_and_of_two_says_nothing():
    fit = Fit()
    for _ in range(2):
        fit.add(10, 0.5, 0.0)
    assert fit.line(0.0) is None
    for _ in range(2):
        fit.add(10, 0.5, 0.0)
    assert fit.line(0.0) == Line(0.0, 0.05)


def test_times_are_predicted_from_what_is_ahead_the_best_worker_and_the_queues_late_waits():
    loads = [PrefillLoad(1000, LINE), PrefillLoad(400, LINE)]
    assert ttft_s(100, 0, loads, None) == pytest.approx(0.01 + 0.0001 * 500)
    # Two workers take 20,000 tokens a second off the queue.
    assert ttft_s(100, 2000, loads, None) == pytest.approx(0.1 + 0.06)
    assert ttft_s(100, 2000, loads, Line(1.0, 0.0)) == pytest.approx(1.0 + 0.06)
    assert ttft_s(100, 0, [*loads, PrefillLoad(0, None)], None) is None
    assert ttft_s(100, 0, [], None) is None
    assert tpot_s(2, [DecodeLoad(10, Line(0.01, 0.001)), DecodeLoad(5, Line(0.02, 0.001))]) == pytest.approx(0.022)
    assert tpot_s(1, [DecodeLoad(10, None)]) is None


def test_a_resumed_request_is_never_refused_for_its_slo():
    async def main() -> None:
        async with sim_cluster(**BIG) as cluster:
            await asyncio.gather(*(ask(cluster, 100 * i, f"w{i}") for i in range(1, 6)))
            request = make_request(400, slo=Slo(ttft_ms=1), output_token_ids=[5], router_id="router-1")
            placement = await cluster.router._admission.place(request)
            cluster.router._admission.leave(placement)
            await placement.decode.abort("r")

    run(main())
