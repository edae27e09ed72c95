"""What is asked of a client that is closed: one typed error, at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cluster.client import AsyncClient, Client
from cluster.errors import APIConnectionError
from tests.cluster.fake_router import FakeRouter
from tests.cluster.job_server import job_server
from tests.router.jobs import jobs_config

CLOSED = "the client is closed"
CALLS: dict[str, Callable[[Any], Any]] = {
    "generate": lambda client: client.generate("Hi"),
    "stream": lambda client: next(client.stream("Hi")),
    "map": lambda client: next(client.map(["Hi"])),
    "submit": lambda client: client.submit(["Hi"]),
    "status": lambda client: client.status(),
    "audit": lambda client: client.audit(),
    "trace": lambda client: client.trace("r1"),
    "jobs.get": lambda client: client.jobs.get("job"),
    "jobs.info": lambda client: client.jobs.info("job"),
    "jobs.list": lambda client: client.jobs.list(),
    "jobs.cancel": lambda client: client.jobs.cancel("job"),
    "jobs.delete": lambda client: client.jobs.delete("job"),
    "jobs.results": lambda client: next(client.jobs.results("job")),
}
ASYNC_CALLS: dict[str, Callable[[Any], Any]] = {
    **{name: call for name, call in CALLS.items() if not {"stream", "map", "jobs.results"} & {name}},
    "stream": lambda client: anext(client.stream("Hi")),
    "map": lambda client: anext(client.map(["Hi"])),
    "jobs.results": lambda client: anext(client.jobs.results("job")),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_call_of_a_closed_client_says_so(router: FakeRouter, name: str):
    client = Client(router.target)
    client.close()
    client.close()
    with pytest.raises(APIConnectionError, match=CLOSED):
        CALLS[name](client)


@pytest.mark.parametrize("name", ASYNC_CALLS)
def test_every_call_of_a_closed_async_client_says_so(router: FakeRouter, name: str):
    async def run() -> None:
        client = AsyncClient(router.target)
        await client.close()
        await client.close()
        with pytest.raises(APIConnectionError, match=CLOSED):
            await ASYNC_CALLS[name](client)

    asyncio.run(run())


def test_what_is_under_way_when_a_client_is_closed_says_so(router: FakeRouter):
    with ThreadPoolExecutor(1) as threads:
        client = Client(router.target)
        first = threading.Event()

        def read() -> None:
            for _ in client.stream("endless"):
                first.set()

        reading = threads.submit(read)
        assert first.wait(5)
        client.close()
        with pytest.raises(APIConnectionError, match=CLOSED):
            reading.result(timeout=5)


def test_closing_an_async_client_is_no_cancellation_of_who_waits(router: FakeRouter):
    async def run() -> None:
        client = AsyncClient(router.target)
        waits = asyncio.create_task(client.generate("endless"))
        await asyncio.to_thread(lambda: router.asked.wait(5))
        await client.close()
        with pytest.raises(APIConnectionError, match=CLOSED):
            await waits

    asyncio.run(run())


def test_cancelling_who_waits_is_one_also_while_the_client_is_closed(router: FakeRouter):
    async def run() -> None:
        client = AsyncClient(router.target)
        waits = asyncio.create_task(client.generate("endless"))
        await asyncio.to_thread(lambda: router.asked.wait(5))
        waits.cancel()
        await client.close()
        with pytest.raises(asyncio.CancelledError):
            await waits

    asyncio.run(run())


def test_a_job_of_a_closed_client_says_so_and_is_not_taken_for_ended(tmp_path):
    with job_server(jobs_config(tmp_path), num_permits=0) as server:
        with Client(server.target) as client:
            job = client.submit(["one"])
        for ask in (job.refresh, job.cancel, lambda: next(job.results()), lambda: job.result(timeout=5)):
            with pytest.raises(APIConnectionError, match=CLOSED):
                ask()
        assert job.status == "running"


def test_a_job_that_is_submitted_while_its_client_is_closed_raises_and_nobody_hangs(tmp_path):
    """The answer comes just before the close, and the job is watched just after it."""
    with job_server(jobs_config(tmp_path), num_permits=0) as server, Client(server.target) as client:
        job = client.submit(["one"])
        client.jobs.close()
        with pytest.raises(APIConnectionError, match=CLOSED):
            client.jobs._watched(job.info)


def test_an_async_job_of_a_closed_client_says_so(tmp_path):
    async def run(target: str) -> None:
        async with AsyncClient(target) as client:
            job = await client.submit(["one"])
        for ask in (job.refresh, job.cancel, job.result):
            with pytest.raises(APIConnectionError, match=CLOSED):
                await ask()

    with job_server(jobs_config(tmp_path), num_permits=0) as server:
        asyncio.run(run(server.target))
