"""How jobs stand beside requests that somebody waits for: their priority, their part of a batch, their metrics."""

from __future__ import annotations

import asyncio
import re

import openai
import pytest

from cluster.client import AsyncClient
from cluster.sim.loop import run
from tests.factories import sim_cluster
from tests.router.jobs import jobs_config, open_router, serving_jobs
from tests.router.serving import http
from tests.router.test_api_keys import key_file
from tests.router.test_batches import COMPLETIONS, create, ended, line
from tests.router.test_prediction import BIG, ask
from workers.errors import OverloadedError
from workers.request import Slo, Terms

JOB = Terms(priority=100, job=True)


def step_s(batch) -> float:
    """15 answers take 20 ms a token."""
    return 0.005 + 0.001 * len(batch.requests)


@pytest.mark.parametrize(("num_jobs", "n"), [(20, 1), (5, 4)])
def test_jobs_that_run_are_no_reason_to_refuse_a_request_for_its_tpot(num_jobs, n):
    async def main() -> None:
        async with sim_cluster(step_s=step_s, **BIG) as cluster:
            jobs = [asyncio.create_task(ask(cluster, 10, f"j{at}", JOB, max_tokens=150, n=n)) for at in range(num_jobs)]
            await asyncio.sleep(2.6)
            await ask(cluster, 10, "quick", Terms(slo=Slo(tpot_ms=20)))
            # Somebody waits for these.
            others = [asyncio.create_task(ask(cluster, 10, f"r{at}", max_tokens=150)) for at in range(20)]
            await asyncio.sleep(1)
            with pytest.raises(OverloadedError, match=r"slo\.tpot_ms is 20"):
                await ask(cluster, 10, "late", Terms(slo=Slo(tpot_ms=20)))
            await asyncio.gather(*jobs, *others)

    run(main())


def test_jobs_take_no_more_of_a_batch_than_the_slo_leaves():
    async def main() -> None:
        async with sim_cluster(step_s=step_s, router={"slo": {"tpot_ms": 20}}, **BIG) as cluster:
            await asyncio.gather(*(ask(cluster, 10, f"w{at}", max_tokens=100 + 20 * at) for at in range(10)))
            jobs = [asyncio.create_task(ask(cluster, 10, f"j{at}", JOB, max_tokens=100)) for at in range(40)]
            await asyncio.sleep(1)
            (decode,) = (worker for worker in cluster.router._pool.workers if worker.role == "decode")
            assert 12 <= decode.num_jobs <= 15
            assert (await ask(cluster, 10, "quick", max_tokens=20)).tpot_s < 0.023
            await asyncio.gather(*jobs)

    run(main())


def test_jobs_go_on_one_by_one_where_the_slo_leaves_nothing():
    async def main() -> None:
        async with sim_cluster(step_s=step_s, router={"slo": {"tpot_ms": 1}}, **BIG) as cluster:
            warm = Terms(slo=Slo(tpot_ms=1e9))
            await asyncio.gather(*(ask(cluster, 10, f"w{at}", warm, max_tokens=100) for at in range(10)))
            await asyncio.gather(*(ask(cluster, 10, f"j{at}", JOB) for at in range(5)))

    run(main())


@pytest.mark.parametrize(("bound", "priority"), [(200, 200), (-5, 100), (100, 100)])
def test_a_job_goes_behind_what_somebody_waits_for_and_before_nothing_that_its_key_may_not(tmp_path, bound, priority):
    async def main() -> None:
        path, keys = key_file(tmp_path, acme={"max_priority": bound})
        router = open_router()
        async with serving_jobs(router, jobs_config(tmp_path), api_keys=str(path)) as served:
            async with AsyncClient(f"127.0.0.1:{served.server.grpc_port}", api_key=keys["acme"]) as client:
                await (await client.submit(["one"], priority=bound, slo={"ttft_ms": 0.001}))
            url = f"http://127.0.0.1:{served.server.http_port}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key=keys["acme"], max_retries=0) as api:
                await ended(api, await create(api, [line("a", COMPLETIONS, prompt="one", priority=bound)]))
        assert router.terms == [Terms("acme", priority, job=True)] * 2

    asyncio.run(main())


def test_a_jobs_prompts_have_metrics_of_their_own_and_none_of_those_that_somebody_waits_for(tmp_path):
    async def main() -> None:
        async with serving_jobs(open_router(), jobs_config(tmp_path)) as served, http(served.server) as client:
            job = await served.submit(["one", "two", "much too long " * 50])
            await served.results(job.job_id)
            await client.post("/v1/completions", json={"prompt": "one"})
            lines = (await client.get("/metrics")).text
        values = {name: float(value) for name, value in re.findall(r"^kvferry_(\S+) (\S+)$", lines, re.MULTILINE)}
        for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
            assert values[f'{name}_count{{model_name="smol"}}'] == 1
        assert values['job_prompts_total{model_name="smol",outcome="done"}'] == 2
        assert values['job_prompts_total{model_name="smol",outcome="failed"}'] == 1
        assert values['job_prompt_seconds_count{model_name="smol"}'] == 3
        # Tokens are tokens.
        assert values['generation_tokens_total{model_name="smol"}'] == 3

    asyncio.run(main())
