"""What a tenant's jobs may take of the disk, and what gives it back."""

from __future__ import annotations

import asyncio
import random

import openai
import pytest
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from cluster.client import AsyncClient
from router.batches.file_store import FileStore
from router.jobs.end import ERROR_FILE, OUTPUT_FILE
from router.jobs.records import Answer, JobStatus, NewJob
from router.jobs.room import ROW_BYTES, bytes_of
from router.jobs.tables import AnswerRow, JobRow, PromptRow
from tests.router.jobs import EchoRouter, jobs_config, open_router, serving_jobs
from tests.router.shared_jobs import TTL_S, job_of, shared
from tests.router.test_api_keys import key_file
from tests.router.test_batches import api, create, ended, line, lines_of
from workers.errors import InvalidRequestError, NotFoundError

FULL = r"your jobs take \d+ bytes, and \d+ more are over 5000 \(jobs\.max_tenant_job_bytes\).*delete"


def big(count: int, job_id: str, tenant: str = "") -> NewJob:
    """About 1,250 bytes each."""
    return NewJob(tenant, job_id, "generate", [b"x" * 1000] * count)


def test_a_tenants_jobs_have_room_for_so_much_and_each_tenant_has_its_own(url):
    async def run() -> None:
        async with shared(url, max_tenant_job_bytes=5000) as at:
            store = at.store()
            await store.add(big(3, "first"))
            with pytest.raises(InvalidRequestError, match=FULL) as caught:
                await store.add(big(1, "second"))
            assert (caught.value.code, caught.value.param) == ("job_quota_exceeded", "requests")
            with pytest.raises(NotFoundError):
                await store.get("", "second")
            # The same job again takes nothing more.
            await store.add(big(3, "first"))
            await store.add(big(3, "first", tenant="other"))

    asyncio.run(run())


def test_jobs_and_files_that_come_to_many_routers_at_once_are_no_more_than_have_room(url):
    async def run() -> None:
        async with shared(url, max_tenant_job_bytes=5000) as at:
            stores = [at.store() for _ in range(8)]
            await asyncio.gather(*(store.get("", "none") for store in stores), return_exceptions=True)  # Connected.
            added = (store.add(big(3, f"job {i}")) for i, store in enumerate(stores))
            refused = [
                one for one in await asyncio.gather(*added, return_exceptions=True) if isinstance(one, Exception)
            ]
            assert [type(one) for one in refused] == [InvalidRequestError] * 7
            files = [FileStore(database, TTL_S, 5000) for database in at.databases]
            kept = (store.add("", "batch", "f", bytes(3000)) for store in files)
            refused = [one for one in await asyncio.gather(*kept, return_exceptions=True) if isinstance(one, Exception)]
            assert [type(one) for one in refused] == [InvalidRequestError] * 7

    asyncio.run(run())


@pytest.mark.parametrize("freed_by", ["delete", "cancel", "ttl"])
def test_room_comes_back(url, freed_by):
    async def run() -> None:
        async with shared(url, max_tenant_job_bytes=5000) as at:
            store, queue = at.store(), at.queue("a")
            await store.add(big(3, "first"))
            if freed_by == "cancel":
                await store.cancel("", "first")
            else:
                for claim in await queue.claim(3):
                    await queue.answer(claim, Answer(b"y" * 1000))
                with pytest.raises(InvalidRequestError, match=FULL):
                    await store.add(big(3, "second"))
            if freed_by == "delete":
                await store.delete("", "first")
            if freed_by == "ttl":
                at.now_s += TTL_S
                await queue.sweep()
            await store.add(big(3, "second"))

    asyncio.run(run())


def test_a_job_is_deleted_with_its_answers_once_it_has_ended(url):
    async def run() -> None:
        async with shared(url) as at:
            store, queue = at.store(), at.queue("a")
            await store.add(job_of(2))
            (claim,) = await queue.claim(1)
            await queue.answer(claim, Answer(b"kept"))
            with pytest.raises(InvalidRequestError, match="job has not ended; cancel it before"):
                await store.delete("", "job")
            await store.cancel("", "job")
            with pytest.raises(NotFoundError):
                await store.delete("another", "job")
            await store.delete("", "job")
            for ask in (store.get("", "job"), store.delete("", "job"), store.answers("", "job", 0, 9)):
                with pytest.raises(NotFoundError):
                    await ask
            assert await at.databases[0].run(lambda session: session.scalar(select(func.count(AnswerRow.place)))) == 0

    asyncio.run(run())


def test_an_answer_that_comes_after_its_job_was_deleted_is_no_other_jobs(url):
    async def run() -> None:
        async with shared(url) as at:
            store, queue = at.store(), at.queue("a")
            await store.add(job_of(1, "old"))
            (late,) = await queue.claim(1)
            await store.cancel("", "old")
            await store.delete("", "old")
            await store.add(job_of(1, "new"))
            assert not await queue.answer(late, Answer(b"of the old one"))
            assert await queue.renew([late.key]) == set()
            job, answers = await store.answers("", "new", 0, 9)
            assert (job.status, list(answers)) == (JobStatus.RUNNING, [])

    asyncio.run(run())


def counted_and_true(session: Session) -> tuple[int, int]:
    kept = [body for table in (PromptRow, AnswerRow) for body in session.scalars(select(table.body))]
    jobs = session.scalars(select(JobRow)).all()
    own = sum(bytes_of(job.details, ()) for job in jobs)
    return sum(job.num_bytes for job in jobs), own + sum(len(body) + ROW_BYTES for body in kept)


def test_what_is_counted_is_what_is_there_whatever_becomes_of_jobs(url):
    rng = random.Random(3)

    async def run() -> None:
        async with shared(url) as at:
            store, queue = at.store(), at.queue("a")
            files = FileStore(at.databases[0], TTL_S, 1 << 20, lambda: at.now_s)
            for number in range(40):
                at.now_s += 5
                details = {OUTPUT_FILE: f"{number} good", ERROR_FILE: f"{number} bad"}
                prompts = [rng.randbytes(rng.randrange(50)) for _ in range(rng.randrange(1, 9))]
                await store.add(NewJob("", f"job {number}", "/v1/completions", prompts, details))
                for claim in await queue.claim(rng.randrange(9)):
                    await queue.answer(claim, Answer(rng.randbytes(rng.randrange(90)), failed=rng.random() < 0.3))
                for job in await store.list("", ["/v1/completions"], 99):
                    if job.ended and rng.random() < 0.1:
                        await store.delete("", job.id)
                    elif not job.ended and rng.random() < 0.1:
                        await store.cancel("", job.id)
                for file in await files.list("", "", 99, "", ascending=True):
                    if rng.random() < 0.3:
                        await files.delete("", file.id)
                await queue.sweep()
                counted, true = await at.databases[0].run(counted_and_true)
                assert counted == true > 0

    asyncio.run(run())


def test_once_a_tenants_answers_fill_it_the_rest_is_not_worked_on_and_says_why(tmp_path):
    async def run() -> None:
        router = EchoRouter(permits=asyncio.Semaphore(1000))
        config = jobs_config(tmp_path, max_tenant_job_bytes=8000, max_in_flight=1)
        async with serving_jobs(router, config) as served:
            job = await served.submit([f"{at}" for at in range(25)])
            results = await served.results(job.job_id)
            failed = [result for result in results if result.HasField("error")]
            assert 0 < len(failed) < 25
            assert len(router.calls) == 25 - len(failed)
            assert {one.error.code for one in failed} == {"job_quota_exceeded"}
            assert "not answered: your jobs' prompts and answers are over 8000" in failed[0].error.message

    asyncio.run(run())


def test_both_apis_say_what_is_full_and_how_to_make_room(tmp_path):
    async def run() -> None:
        path, keys = key_file(tmp_path, acme={}, other={})
        config = jobs_config(tmp_path, max_tenant_job_bytes=5000)
        async with serving_jobs(open_router(), config, api_keys=str(path)) as served:
            native = AsyncClient(f"127.0.0.1:{served.server.grpc_port}", api_key=keys["acme"])
            url = f"http://127.0.0.1:{served.server.http_port}/v1"
            async with native, openai.AsyncOpenAI(base_url=url, api_key=keys["acme"], max_retries=0) as http:
                job = await native.submit(["x" * 4000])
                await job
                with pytest.raises(InvalidRequestError, match=FULL):
                    await native.submit(["x" * 5000])
                lines = [line("a", prompt="x" * 5000)]
                with pytest.raises(openai.BadRequestError, match=FULL) as caught:
                    await create(http, lines)
                assert (caught.value.code, caught.value.param) == ("job_quota_exceeded", "input_file_id")
                await native.jobs.delete(job.id)
                await native.submit(["x" * 4000])

    asyncio.run(run())


def test_deleting_a_batchs_output_file_makes_room(tmp_path):
    async def run() -> None:
        async with api(open_router(), tmp_path, max_tenant_job_bytes=5000) as (_, client):
            lines = [line(f"{at}" * 300, prompt="one") for at in range(3)]
            first = await ended(client, await create(client, lines))
            assert len(await lines_of(client, first.output_file_id)) == 3
            with pytest.raises(openai.BadRequestError, match=FULL):
                await create(client, lines)
            await client.files.delete(first.output_file_id or "")
            with pytest.raises(openai.NotFoundError):
                await client.files.content(first.output_file_id or "")
            second = await ended(client, await create(client, lines))
            assert len(await lines_of(client, second.output_file_id)) == 3

    asyncio.run(run())
