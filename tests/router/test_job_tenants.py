"""Jobs beside other requests: whose they are, and that they let those go first that somebody waits for."""

from __future__ import annotations

import asyncio

import openai
import pytest

from cluster.client import AsyncClient
from router.text import seed_of
from tests.router.jobs import EchoRouter, jobs_config, open_router, serving_jobs
from tests.router.serving import until
from tests.router.test_api_keys import key_file
from tests.router.test_batches import COMPLETIONS, create, ended, line
from tests.router.whole import GOOD, whole_router
from workers.errors import AuthenticationError, NotFoundError
from workers.request import Terms


def test_a_job_is_its_tenants_alone_and_so_are_its_requests(tmp_path):
    async def run(router: EchoRouter) -> str:
        path, keys = key_file(tmp_path, acme={}, other={})
        async with serving_jobs(router, jobs_config(tmp_path), api_keys=str(path)) as served:
            target = f"127.0.0.1:{served.server.grpc_port}"
            async with (
                AsyncClient(target, api_key=keys["acme"]) as acme,
                AsyncClient(target, api_key=keys["other"]) as b,
            ):
                job = await acme.submit(["one"])
                assert (await job)[0].completion is not None
                assert await b.jobs.list() == []
                with pytest.raises(NotFoundError):
                    await b.jobs.get(job.id)
            async with AsyncClient(target, api_key="wrong") as nobody:
                with pytest.raises(AuthenticationError):
                    await nobody.jobs.list()
            return job.id

    router = open_router()
    job_id = asyncio.run(run(router))
    assert router.terms == [Terms("acme", 100, job=True)]
    assert router.calls[0][1].seed == seed_of(f"{job_id}.0", "acme")


def test_a_batch_is_its_tenants_alone_and_so_are_its_requests(tmp_path):
    async def run(router: EchoRouter) -> None:
        path, keys = key_file(tmp_path, acme={}, other={})
        async with serving_jobs(router, jobs_config(tmp_path), api_keys=str(path)) as served:
            url = f"http://127.0.0.1:{served.server.http_port}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key=keys["acme"], max_retries=0) as acme:
                batch = await ended(acme, await create(acme, [line("a", COMPLETIONS, prompt="one", priority=-5)]))
                assert batch.status == "completed"
            async with openai.AsyncOpenAI(base_url=url, api_key=keys["other"], max_retries=0) as other:
                assert [one.id async for one in other.files.list()] == []
                for look in (other.batches.retrieve(batch.id), other.files.content(batch.output_file_id or "")):
                    with pytest.raises(openai.NotFoundError):
                        await look

    router = open_router()
    asyncio.run(run(router))
    assert router.terms == [Terms("acme", 100, job=True)]


def test_uploads_may_be_larger_than_other_bodies(tmp_path):
    async def run() -> None:
        async with serving_jobs(open_router(), jobs_config(tmp_path), max_body_bytes=1000) as served:
            url = f"http://127.0.0.1:{served.server.http_port}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
                file = await client.files.create(file=("in.jsonl", b"x" * 5000), purpose="batch")
                assert file.bytes == 5000

    asyncio.run(run())


def test_one_tenants_many_jobs_do_not_hold_up_anothers(tmp_path):
    async def run() -> None:
        path, keys = key_file(tmp_path, big={}, small={})
        router = EchoRouter()
        async with serving_jobs(router, jobs_config(tmp_path, max_in_flight=4), api_keys=str(path)) as served:
            target = f"127.0.0.1:{served.server.grpc_port}"
            async with AsyncClient(target, api_key=keys["big"]) as big, AsyncClient(target, api_key=keys["small"]) as b:
                for at in range(20):
                    await big.submit([f"one {at}"])
                await until(lambda: router.num_running == 4)
                job = await b.submit(["two", "three"])
                for _ in range(22):
                    router.permits.release()
                await until(lambda: len(router.calls) == 22)
                assert len(await job) == 2
        order = [terms.tenant for terms in router.terms]
        # Two of four that had begun end, and both are at work.
        assert order.index("small") <= 8
        assert order[:12].count("small") == 2

    asyncio.run(run())


def test_a_job_is_not_held_to_the_slo_of_requests_that_somebody_waits_for(tmp_path):
    """Which would refuse its prompts for as long as there are such requests, or for ever those that are too long."""

    async def run() -> None:
        slo = {"ttft_ms": 0.001, "tpot_ms": 0.001}
        async with (
            whole_router(jobs=jobs_config(tmp_path), slo=slo) as whole,
            AsyncClient(whole.grpc_target) as client,
            whole.client() as http,
            openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{whole.http_port}/v1", api_key="none") as api,
        ):
            while (await http.post("/v1/completions", json=GOOD)).status_code == 200:
                pass
            async with asyncio.timeout(4):
                assert len(await (await client.submit(["one", "two"], max_tokens=2))) == 2
                batch = await ended(api, await create(api, [line("a", COMPLETIONS, prompt="one", max_tokens=2)]))
                assert batch.output_file_id is not None

    asyncio.run(run())


def test_a_request_that_somebody_waits_for_goes_before_a_job(tmp_path):
    """A job of 40 prompts of several steps each is there; a request that comes then is answered among the first."""

    async def run() -> None:
        config = jobs_config(tmp_path, max_in_flight=40)
        async with whole_router(jobs=config) as whole, AsyncClient(whole.grpc_target) as client:
            job = await client.submit([[at + 1] * 60 for at in range(40)], max_tokens=2, temperature=0, ignore_eos=True)
            router = whole.serving.router
            await until(lambda: router.num_queued > 30)
            await client.generate([7] * 10, max_tokens=2, temperature=0, ignore_eos=True)
            assert router.num_queued > 15
            assert len(await job) == 40

    asyncio.run(run())


def test_the_answers_of_a_job_cost_its_tenants_tokens_and_wait_for_them(tmp_path):
    async def run() -> None:
        # The prompt and the answer of one prompt.
        path, keys = key_file(tmp_path, acme={"tokens_per_minute": 600})
        router = open_router()
        async with serving_jobs(router, jobs_config(tmp_path), api_keys=str(path)) as served:
            target = f"127.0.0.1:{served.server.grpc_port}"
            async with AsyncClient(target, api_key=keys["acme"]) as acme:
                assert served.server._keys is not None
                caller = served.server._keys.of_tenant("acme")
                assert caller is not None
                tokens = caller.tokens
                assert tokens is not None
                before = tokens.left
                (result,) = await (await acme.submit(["one two three"]))
                assert result.completion is not None
                used = result.completion.usage
                spent = used.num_prompt_tokens + used.num_completion_tokens
                # Ten come back in a second.
                assert spent - 5 < before - tokens.left <= spent
                tokens.spend(tokens.left + 10)
                job = await acme.submit(["four"])
                await asyncio.sleep(0.5)
                assert len(router.calls) == 1
                assert (await job)[0].completion is not None

    asyncio.run(run())
