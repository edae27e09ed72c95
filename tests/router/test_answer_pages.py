"""Large answers are read a few at a time, and all of them."""

from __future__ import annotations

import asyncio

import pytest

from protos import router_pb2 as pb
from router.batches.file_store import FileStore
from router.jobs.end import ERROR_FILE, OUTPUT_FILE
from router.jobs.records import Answer, NewJob
from tests.router.jobs import jobs_config, open_router, serving_jobs
from tests.router.shared_jobs import TTL_S, shared

PAGE_BYTES = 100
# A small one, one that fills a page, one that is over it, ...
SIZES = [10, 90, 100, 1, 500, 99, 2, 40, 40, 40]


@pytest.fixture(autouse=True)
def small_pages(monkeypatch):
    monkeypatch.setattr("router.jobs.pages._PAGE_BYTES", PAGE_BYTES)


def test_a_page_has_so_many_bytes_or_one_answer_and_none_is_left_out(url):
    async def run() -> None:
        async with shared(url) as at:
            store, queue = at.store(), at.queue("a")
            details = {OUTPUT_FILE: "out", ERROR_FILE: "err"}
            await store.add(NewJob("", "job", "kind", [b"x"] * len(SIZES), details))
            for claim in await queue.claim(len(SIZES)):
                await queue.answer(claim, Answer(bytes([65 + claim.index]) * SIZES[claim.index]))
            pages, place = [], 0
            while answers := (await store.answers("", "job", place, 4))[1]:
                pages.append([len(answer.body) for answer in answers])
                place = answers[-1].place + 1
            assert pages == [[10, 90], [100], [1], [500], [99], [2, 40, 40], [40]]
            files = FileStore(at.databases[0], TTL_S, 1 << 20, lambda: at.now_s)
            content = [piece async for piece in files.content("", "out")]
            assert len(content) > 5
            lines = b"".join(content).split(b"\n")
            assert [len(line) for line in lines] == [*SIZES, 0]

    asyncio.run(run())


def test_every_answer_comes_in_messages_of_that_size(tmp_path):
    async def run() -> None:
        async with serving_jobs(open_router(), jobs_config(tmp_path)) as served:
            job = await served.submit([f"prompt {at}" for at in range(20)])
            assert len(await served.results(job.job_id)) == 20
            call = served.jobs.JobResults(pb.JobResultsRequest(job_id=job.job_id))
            sizes = [message.ByteSize() async for message in call]
            assert len(sizes) >= 10
            # With what a message has beside two answers.
            assert max(sizes) < 2 * PAGE_BYTES

    asyncio.run(run())
