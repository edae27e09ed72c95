"""Durable jobs from Python: they outlive the client that submitted them, and the router that took them."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from pathlib import Path
from typing import Unpack

import grpc

from cluster.connection import Connection
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
from cluster.routers import Patience, closed_error
from protos import router_pb2 as pb
from workers.errors import KVFerryError, UnavailableError

# Between two looks at jobs that somebody waits for.
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.05, 1.0


class Job(KnownJob, Future[list[JobResult]]):
    """A future, whose result is all results in the order of the prompts; concurrent.futures.as_completed takes it."""

    def __init__(self, jobs: Jobs, info: JobInfo) -> None:
        super().__init__()
        self._jobs = jobs
        # Looked at every second until its end.
        self.info = info
        self._seeing = threading.Lock()
        self.set_running_or_notify_cancel()

    def refresh(self) -> JobInfo:
        """Look now."""
        self._see(self._jobs.info(self.id))
        return self.info

    def results(self) -> Generator[JobResult]:
        """As they come, from the first on; ends with the job."""
        return self._jobs.results(self.id)

    def result(self, timeout: float | None = None) -> list[JobResult]:
        """Waits for the job's end. What was not answered before it was cancelled or expired is not there."""
        super().result(timeout)
        return sorted(self.results(), key=lambda result: result.index)

    def cancel(self) -> bool:
        """Its prompts that have no answer yet get none. False: it had ended before."""
        if self.info.ended:
            return False
        self._see(self._jobs.cancel(self.id))
        return self.info.status == "cancelled"

    def _see(self, info: JobInfo) -> None:
        with self._seeing:
            self._saw(info)
        if info.ended:
            # Two may see it; the results themselves are fetched by who wants them.
            with suppress(InvalidStateError):
                self.set_result([])


class Jobs:
    """`client.jobs`. Raises KVFerryError: NotFoundError for a job that is not there, or no more."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._watch = _Watch(self)

    def submit(self, prompts: Iterable[Prompt] | str | Path, **options: Unpack[Options]) -> Job:
        """It is on disk when this returns."""
        # With an id chosen here, a try whose answer was lost makes no second job.
        request = pb.SubmitJobRequest(job_id=new_job_id(), requests=job_requests(prompts, options))
        metadata = self._connection.metadata
        answer = self._connection.call(
            lambda stubs, timeout_s: stubs.jobs.SubmitJob(request, timeout=timeout_s, metadata=metadata),
            SUBMIT_TIMEOUT_S,
        )
        return self._watched(info_from_pb(answer.job))

    def get(self, job_id: str) -> Job:
        return self._watched(self.info(job_id))

    def info(self, job_id: str) -> JobInfo:
        request, metadata = pb.GetJobRequest(job_id=job_id), self._connection.metadata
        answer = self._connection.call(
            lambda stubs, timeout_s: stubs.jobs.GetJob(request, timeout=timeout_s, metadata=metadata), CALL_TIMEOUT_S
        )
        return info_from_pb(answer.job)

    def list(self, limit: int = 100, after: str = "") -> list[JobInfo]:
        """The latest first; `after`: the id of the last one of the page before."""
        request, metadata = pb.ListJobsRequest(limit=limit, after=after), self._connection.metadata
        answer = self._connection.call(
            lambda stubs, timeout_s: stubs.jobs.ListJobs(request, timeout=timeout_s, metadata=metadata), CALL_TIMEOUT_S
        )
        return [info_from_pb(job) for job in answer.jobs]

    def cancel(self, job_id: str) -> JobInfo:
        """To cancel one that has ended changes nothing."""
        request, metadata = pb.CancelJobRequest(job_id=job_id), self._connection.metadata
        answer = self._connection.call(
            lambda stubs, timeout_s: stubs.jobs.CancelJob(request, timeout=timeout_s, metadata=metadata), CALL_TIMEOUT_S
        )
        return info_from_pb(answer.job)

    def delete(self, job_id: str) -> None:
        """With its results; it has to have ended. To make room where jobs.max_tenant_job_bytes is reached."""
        request, metadata = pb.DeleteJobRequest(job_id=job_id), self._connection.metadata
        self._connection.call(
            lambda stubs, timeout_s: stubs.jobs.DeleteJob(request, timeout=timeout_s, metadata=metadata), CALL_TIMEOUT_S
        )

    def results(self, job_id: str) -> Generator[JobResult]:
        """As they come. It goes on at another router when one dies."""
        connection, patience = self._connection, Patience(self._connection.routers, job_id)
        request, ended = pb.JobResultsRequest(job_id=job_id), False
        with connection.routers.in_use():
            while not ended:
                call = connection.stubs[patience.at].jobs.JobResults(request, metadata=connection.metadata)
                try:
                    for message in call:
                        patience.heard()
                        for result in message.results:
                            request.start = result.place + 1
                            yield result_from_pb(result)
                    ended = True
                except grpc.RpcError as exc:
                    time.sleep(patience.pause_s(exc))
                finally:
                    call.cancel()

    def close(self) -> None:
        self._watch.close()

    def _watched(self, info: JobInfo) -> Job:
        job = Job(self, info)
        self._watch.add(job)
        return job


class _Watch:
    """One thread looks at all jobs that have not ended."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self._lock = threading.Lock()
        self._watched: list[Job] = []
        self._closed = threading.Event()
        self._running = False

    def add(self, job: Job) -> None:
        """Raises UnavailableError when nobody looks any more."""
        job._see(job.info)
        with self._lock:
            if self._closed.is_set():
                raise closed_error()
            self._watched.append(job)
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="kvferry-jobs", daemon=True).start()

    def close(self) -> None:
        """Nobody waits for what is looked at no more."""
        with self._lock:
            self._closed.set()
            for job in self._watched:
                _fail(job, UnavailableError(f"{job.id}: the client is closed; `jobs.get` of a new one finds the job"))

    def _run(self) -> None:
        wait_s = _FIRST_LOOK_S
        while self._some_left():
            if self._closed.wait(wait_s):
                return
            wait_s = min(2 * wait_s, _LONGEST_LOOK_S)
            for job in self._watched:
                self._look(job)

    def _some_left(self) -> bool:
        with self._lock:
            self._watched = [job for job in self._watched if not job.done()]
            self._running = bool(self._watched)
            return self._running

    def _look(self, job: Job) -> None:
        try:
            job.refresh()
        except KVFerryError as error:
            _fail(job, error)


def _fail(job: Job, error: KVFerryError) -> None:
    with suppress(InvalidStateError):
        job.set_exception(error)
