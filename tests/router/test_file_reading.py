"""Files that are read while something happens to them, or to the database."""

from __future__ import annotations

import asyncio
import threading

import httpx
import openai
import pytest

from router.batches import batches
from router.batches.file_store import FileStore
from router.batches.lines import BatchLines, parse_lines
from router.jobs.end import ERROR_FILE, OUTPUT_FILE
from router.jobs.records import Answer, NewJob
from tests.router.jobs import open_router
from tests.router.shared_jobs import TTL_S, shared
from tests.router.test_batches import api, create, ended, line
from workers.errors import NotFoundError


def test_answers_that_expire_while_they_are_read_are_an_error_and_no_shorter_file(url, monkeypatch):
    monkeypatch.setattr("router.batches.file_store._PAGE", 2)

    async def run() -> None:
        async with shared(url) as at:
            store, queue = at.store(), at.queue("a")
            files = FileStore(at.databases[0], TTL_S, 1 << 20, lambda: at.now_s)
            await store.add(NewJob("", "job", "kind", [b"x"] * 5, {OUTPUT_FILE: "out", ERROR_FILE: "err"}))
            for claim in await queue.claim(5):
                await queue.answer(claim, Answer(b"%d" % claim.index))
            whole = [piece async for piece in files.content("", "out")]
            assert b"".join(whole) == b"0\n1\n2\n3\n4\n"
            assert (await files.get("", "out")).num_bytes == 10
            content = files.content("", "out")
            assert await anext(content) == b"0\n1\n"
            at.now_s += TTL_S
            await queue.sweep()
            with pytest.raises(NotFoundError, match="it may have expired"):
                await anext(content)

    asyncio.run(run())


def test_a_download_that_is_cut_off_is_no_whole_one(tmp_path, monkeypatch):
    monkeypatch.setattr("router.batches.file_store._PAGE", 1)

    async def run() -> None:
        async with api(open_router(), tmp_path, max_in_flight=100) as (served, client):
            batch = await ended(client, await create(client, [line(f"{at}", prompt="one") for at in range(200)]))
            path = f"/v1/files/{batch.output_file_id}/content"
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{served.server.http_port}") as http:
                answer = await http.get(path)
                assert int(answer.headers["content-length"]) == len(answer.content)
                assert answer.text.count("\n") == 200
                async with http.stream("GET", path) as response:
                    await client.files.delete(batch.output_file_id or "")
                    with pytest.raises(httpx.RemoteProtocolError):
                        await response.aread()
            # Nobody else notices.
            assert (await client.batches.retrieve(batch.id)).status == "completed"

    asyncio.run(run())


def test_jobs_go_on_while_the_lines_of_a_large_file_are_read(tmp_path, monkeypatch):
    """Neither the thread of the database nor its lock, which other routers need, waits for that."""
    parses, go_on = threading.Event(), threading.Event()

    def slow(content: bytes, endpoint: str, max_num_prompts: int) -> BatchLines:
        parses.set()
        assert go_on.wait(10)
        return parse_lines(content, endpoint, max_num_prompts)

    async def run() -> None:
        async with api(open_router(), tmp_path) as (served, client):
            monkeypatch.setattr(batches, "parse_lines", slow)
            large = asyncio.create_task(create(client, [line("a", prompt="one")]))
            assert await asyncio.to_thread(parses.wait, 10)
            job = await served.submit(["one"])
            async with asyncio.timeout(5):
                assert len(await served.results(job.job_id)) == 1
            go_on.set()
            assert (await ended(client, await large)).status == "completed"

    try:
        asyncio.run(run())
    finally:
        go_on.set()


def test_what_is_no_file_any_more_is_not_found_before_the_first_byte(tmp_path):
    async def run() -> None:
        async with api(open_router(), tmp_path) as (_, client):
            with pytest.raises(openai.NotFoundError, match="there is no file"):
                await client.files.content("file-gone")

    asyncio.run(run())
