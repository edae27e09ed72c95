"""Durable jobs over the native API."""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from typing import Any

import grpc.aio

from protos import router_pb2 as pb
from protos import router_pb2_grpc
from router.config import JobsConfig
from router.jobs.answers import NATIVE
from router.jobs.records import JobRecord, JobStatus, NewJob, StoredAnswer
from router.jobs.runner import Jobs
from router.jobs.store import JobStore
from router.jobs.tenant import calling_priority, calling_tenant
from workers.errors import InvalidRequestError, KVFerryError
from workers.rpc import abort_with, typed_errors
from workers.wire import timeline_to_pb

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

# With an index it has to be a request's id too.
_JOB_ID = re.compile(r"[!-~]{1,100}")
_PAGE, _LONGEST_PAGE = 100, 1000
# Answers in one message.
_NUM_RESULTS = 64
# Between two looks for answers, longer and longer while none come.
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.05, 0.5

_STATUSES = {
    JobStatus.RUNNING: pb.JOB_STATUS_RUNNING,
    JobStatus.COMPLETED: pb.JOB_STATUS_COMPLETED,
    JobStatus.CANCELLED: pb.JOB_STATUS_CANCELLED,
    JobStatus.EXPIRED: pb.JOB_STATUS_EXPIRED,
}


class JobService(router_pb2_grpc.JobServiceServicer):
    def __init__(self, store: JobStore, jobs: Jobs, config: JobsConfig) -> None:
        self._store = store
        self._jobs = jobs
        self._config = config

    @typed_errors
    async def SubmitJob(self, request: pb.SubmitJobRequest, context: Context) -> pb.SubmitJobResponse:
        job_id = request.job_id or f"job-{uuid.uuid4().hex}"
        self._check(job_id, len(request.requests))
        prompts = [one.SerializeToString(deterministic=True) for one in request.requests]
        job = await self._store.add(NewJob(calling_tenant(), job_id, NATIVE, prompts, priority=calling_priority()))
        self._jobs.wake()
        logger.info("%s: %d prompts", job_id, job.num_prompts)
        return pb.SubmitJobResponse(job=_job_to_pb(job))

    @typed_errors
    async def GetJob(self, request: pb.GetJobRequest, context: Context) -> pb.GetJobResponse:
        job = await self._store.get(calling_tenant(), request.job_id)
        return pb.GetJobResponse(job=_job_to_pb(_native(job)))

    @typed_errors
    async def ListJobs(self, request: pb.ListJobsRequest, context: Context) -> pb.ListJobsResponse:
        limit = min(request.limit, _LONGEST_PAGE) if request.limit > 0 else _PAGE
        jobs = await self._store.list(calling_tenant(), (NATIVE,), limit, request.after)
        return pb.ListJobsResponse(jobs=map(_job_to_pb, jobs))

    @typed_errors
    async def CancelJob(self, request: pb.CancelJobRequest, context: Context) -> pb.CancelJobResponse:
        _native(await self._store.get(calling_tenant(), request.job_id))
        job = await self._store.cancel(calling_tenant(), request.job_id)
        self._jobs.drop(job.key)
        return pb.CancelJobResponse(job=_job_to_pb(job))

    @typed_errors
    async def DeleteJob(self, request: pb.DeleteJobRequest, context: Context) -> pb.DeleteJobResponse:
        _native(await self._store.get(calling_tenant(), request.job_id))
        await self._store.delete(calling_tenant(), request.job_id)
        return pb.DeleteJobResponse()

    async def JobResults(self, request: pb.JobResultsRequest, context: Context) -> None:  # type: ignore[override]
        place, wait_s, told = max(request.start, 0), _FIRST_LOOK_S, False
        try:
            while True:
                job, answers = await self._store.answers(calling_tenant(), request.job_id, place, _NUM_RESULTS)
                _native(job)
                if answers or not told:
                    # The first one may be empty: it tells a client that has lost another router that it is heard here.
                    await context.write(pb.JobResultsResponse(results=map(_result_of, answers)))
                    place, wait_s, told = place + len(answers), _FIRST_LOOK_S, True
                elif job.ended:
                    return
                else:
                    await asyncio.sleep(wait_s)
                    wait_s = min(2 * wait_s, _LONGEST_LOOK_S)
        except KVFerryError as error:
            await abort_with(context, error)

    def _check(self, job_id: str, num_prompts: int) -> None:
        if not _JOB_ID.fullmatch(job_id):
            raise InvalidRequestError(
                f"job_id is {job_id[:40]!r}; it must be 1 to 100 visible ASCII characters", param="job_id"
            )
        if not num_prompts:
            raise InvalidRequestError("a job needs at least one prompt", param="requests")
        if num_prompts > self._config.max_num_prompts:
            raise InvalidRequestError(
                f"the job has {num_prompts} prompts; at most {self._config.max_num_prompts} (jobs.max_num_prompts): "
                "make several jobs of it",
                param="requests",
            )


def _native(job: JobRecord) -> JobRecord:
    if job.kind != NATIVE:
        raise InvalidRequestError(f"{job.id} is a batch; ask for it at /v1/batches", param="job_id")
    return job


def _result_of(answer: StoredAnswer) -> pb.JobResult:
    result = pb.JobResult.FromString(answer.body)
    result.place = answer.place
    return result


def _job_to_pb(job: JobRecord) -> pb.Job:
    used = job.used
    return pb.Job(
        job_id=job.id,
        status=_STATUSES[job.status],
        num_prompts=job.num_prompts,
        num_answered=job.num_answered,
        num_failed=job.num_failed,
        usage=pb.Usage(
            num_prompt_tokens=used.num_prompt_tokens,
            num_completion_tokens=used.num_completion_tokens,
            num_cached_tokens=used.num_cached_tokens,
        ),
        timeline=timeline_to_pb(used.timeline),
        created_s=job.created_s,
        finished_s=job.finished_s,
        expires_s=job.expires_s,
    )
