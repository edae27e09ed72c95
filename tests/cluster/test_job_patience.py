"""Results that take long come through whatever number of routers goes meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from cluster.client import AsyncClient, Client
from protos import router_pb2 as pb
from protos import router_pb2_grpc
from tests.cluster.fake_router import FakeRouter, serving
from tests.router.jobs import EchoRouter, jobs_config, serving_jobs

PERIOD_S = 0.1


class Dying(router_pb2_grpc.JobServiceServicer):
    """Looks the job up and goes, again and again, until there is a result at last."""

    def __init__(self, num_deaths: int) -> None:
        self.num_left = num_deaths

    async def JobResults(self, request: pb.JobResultsRequest, context: Any) -> AsyncIterator[pb.JobResultsResponse]:  # noqa: N802
        yield pb.JobResultsResponse()
        if self.num_left:
            self.num_left -= 1
            await asyncio.sleep(PERIOD_S)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        yield pb.JobResultsResponse(results=[pb.JobResult(index=7, error=pb.JobError(message="done"))])


@contextmanager
def dying(num_deaths: int) -> Iterator[FakeRouter]:
    jobs = Dying(num_deaths)  # type: ignore[abstract]
    with serving(jobs=jobs) as router:
        yield router


@pytest.mark.parametrize("kind", ["blocking", "async"])
def test_who_reads_results_waits_as_long_for_each_router_that_goes(kind, monkeypatch):
    monkeypatch.setattr("cluster.routers._RESUME_S", 4 * PERIOD_S)

    async def read(target: str) -> list[int]:
        async with AsyncClient(target) as client:
            return [result.index async for result in client.jobs.results("job")]

    began_s = time.monotonic()
    with dying(8) as router:
        if kind == "async":
            assert asyncio.run(read(router.target)) == [7]
        else:
            with Client(router.target) as client:
                assert [result.index for result in client.jobs.results("job")] == [7]
    assert time.monotonic() - began_s > 8 * PERIOD_S


def test_a_router_says_at_once_that_it_has_the_job(tmp_path):
    async def run() -> None:
        async with serving_jobs(EchoRouter(), jobs_config(tmp_path)) as served:
            job = await served.submit(["one"])
            call = served.jobs.JobResults(pb.JobResultsRequest(job_id=job.job_id))
            async with asyncio.timeout(5):
                first = await call.read()
            assert isinstance(first, pb.JobResultsResponse)
            assert not first.results
            served.router.permits.release()
            assert len(await served.results(job.job_id)) == 1

    asyncio.run(run())
