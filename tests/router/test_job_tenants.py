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
from tests.router.whole import whole_router
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
    assert router.terms == [Terms("acme", 100)]
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
    assert router.terms == [Terms("acme", 100)]


def test_uploads_may_be_larger_than_other_bodies(tmp_path):
    async def run() -> None:
        async with serving_jobs(open_router(), jobs_config(tmp_path), max_body_bytes=1000) as served:
            url = f"http://127.0.0.1:{served.server.http_port}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
                file = await client.files.create(file=("in.jsonl", b"x" * 5000), purpose="batch")
                assert file.bytes == 5000

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
