"""cluster/jobs.py for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Iterable
from contextlib import aclosing
from pathlib import Path
from typing import Any, Unpack

import grpc.aio

from cluster.connection import AsyncConnection
from cluster.job_records import (
    CALL_TIMEOUT_S,
    SUBMIT_TIMEOUT_S,
    JobInfo,
    JobResult,
    KnownJob,
    info_from_pb,
    new_job_id,
    result_from_pb,
)
from cluster.prompts import job_requests
from cluster.records import Options, Prompt
from protos import router_pb2 as pb


class AsyncJob(KnownJob):
    """To await it is to wait for all results, in the order of the prompts; asyncio.as_completed takes it."""

    def __init__(self, jobs: AsyncJobs, info: JobInfo) -> None:
        self._jobs = jobs
        self.info = info

    async def refresh(self) -> JobInfo:
        """Look now."""
        self._saw(await self._jobs.info(self.id))
        return self.info

    def results(self) -> AsyncGenerator[JobResult]:
        """As they come, from the first on; ends with the job."""
        return self._jobs.results(self.id)

    async def result(self) -> list[JobResult]:
        """Waits for the job's end. What was not answered before it was cancelled or expired is not there."""
        async with aclosing(self.results()) as results:
            found = [result async for result in results]
        await self.refresh()
        return sorted(found, key=lambda result: result.index)

    async def cancel(self) -> bool:
        """Its prompts that have no answer yet get none. False: it had ended before."""
        if self.info.ended:
            return False
        self._saw(await self._jobs.cancel(self.id))
        return self.info.status == "cancelled"

    def __await__(self) -> Generator[Any, Any, list[JobResult]]:
        return self.result().__await__()


class AsyncJobs:
    """`client.jobs`. Raises KVFerryError: NotFoundError for a job that is not there, or no more."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def submit(self, prompts: Iterable[Prompt] | str | Path, **options: Unpack[Options]) -> AsyncJob:
        """It is on disk when this returns."""
        # With an id chosen here, a try whose answer was lost makes no second job.
        requests = await asyncio.to_thread(job_requests, prompts, options)
        request = pb.SubmitJobRequest(job_id=new_job_id(), requests=requests)
        metadata = self._connection.metadata
        answer = await self._connection.call(
            lambda stubs, timeout_s: stubs.jobs.SubmitJob(request, timeout=timeout_s, metadata=metadata),
            SUBMIT_TIMEOUT_S,
        )
        return AsyncJob(self, info_from_pb(answer.job))

    async def get(self, job_id: str) -> AsyncJob:
        return AsyncJob(self, await self.info(job_id))

    async def info(self, job_id: str) -> JobInfo:
        request, metadata = pb.GetJobRequest(job_id=job_id), self._connection.metadata
        answer = await self._connection.call(
            lambda stubs, timeout_s: stubs.jobs.GetJob(request, timeout=timeout_s, metadata=metadata), CALL_TIMEOUT_S
        )
        return info_from_pb(answer.job)

    async def list(self, limit: int = 100, after: str = "") -> list[JobInfo]:
        """The latest first; `after`: the id of the last one of the page before."""
        request, metadata = pb.ListJobsRequest(limit=limit, after=after), self._connection.metadata
        answer = await self._connection.call(
            lambda stubs, timeout_s: stubs.jobs.ListJobs(request, timeout=timeout_s, metadata=metadata), CALL_TIMEOUT_S
        )
        return [info_from_pb(job) for job in answer.jobs]

    async def cancel(self, job_id: str) -> JobInfo:
        """To cancel one that has ended changes nothing."""
        request, metadata = pb.CancelJobRequest(job_id=job_id), self._connection.metadata
        answer = await self._connection.call(
            lambda stubs, timeout_s: stubs.jobs.CancelJob(request, timeout=timeout_s, metadata=metadata), CALL_TIMEOUT_S
        )
        return info_from_pb(answer.job)

    async def delete(self, job_id: str) -> None:
        """With its results; it has to have ended. To make room where jobs.max_tenant_job_bytes is reached."""
        request, metadata = pb.DeleteJobRequest(job_id=job_id), self._connection.metadata
        await self._connection.call(
            lambda stubs, timeout_s: stubs.jobs.DeleteJob(request, timeout=timeout_s, metadata=metadata), CALL_TIMEOUT_S
        )

    async def results(self, job_id: str) -> AsyncGenerator[JobResult]:
        """As they come. It goes on at another router when one dies."""
        connection, patience = self._connection, self._connection.patience()
        request, ended = pb.JobResultsRequest(job_id=job_id), False
        with connection.routers.in_use():
            while not ended:
                call = connection.stubs[patience.at].jobs.JobResults(request, metadata=connection.metadata)
                try:
                    async for message in call:
                        patience.heard()
                        for result in message.results:
                            request.start = result.place + 1
                            yield result_from_pb(result)
                    ended = True
                except grpc.aio.AioRpcError as exc:
                    await asyncio.sleep(patience.pause_s(exc))
                finally:
                    call.cancel()
