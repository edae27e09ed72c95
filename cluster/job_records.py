"""What a client knows of a job, from its protobuf form."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Literal, cast

from cluster.records import Completion, Usage, chunk_from_pb, completion_of
from protos import router_pb2 as pb
from workers.errors import BY_NAME, KVFerryError
from workers.timeline import Timeline
from workers.wire import timeline_from_pb

# Of a call about jobs; to put down a large one takes a while.
CALL_TIMEOUT_S = 30.0
SUBMIT_TIMEOUT_S = 300.0

JobStatus = Literal["running", "completed", "cancelled", "expired"]


@dataclass(frozen=True, slots=True)
class JobInfo:
    """A job as it stood when it was looked at. Times are Unix times in seconds."""

    id: str
    status: JobStatus
    num_prompts: int
    # Those that failed included.
    num_answered: int
    num_failed: int
    # Of all answers together.
    usage: Usage
    timeline: Timeline
    created_s: float
    finished_s: float | None
    # Until then its results can be read.
    expires_s: float | None

    @property
    def ended(self) -> bool:
        return self.status != "running"

    @property
    def progress(self) -> float:
        """0 to 1."""
        return self.num_answered / self.num_prompts


class KnownJob:
    """What a job of either client tells of itself."""

    # As it was when last looked at.
    info: JobInfo

    @property
    def id(self) -> str:
        return self.info.id

    @property
    def status(self) -> JobStatus:
        return self.info.status

    @property
    def progress(self) -> float:
        """0 to 1."""
        return self.info.progress

    @property
    def usage(self) -> Usage:
        return self.info.usage

    @property
    def timeline(self) -> Timeline:
        """The sum over all answers."""
        return self.info.timeline

    def _saw(self, info: JobInfo) -> None:
        # Of two looks at once the one that saw the end is right.
        if not self.info.ended:
            self.info = info


@dataclass(frozen=True, slots=True)
class JobResult:
    """The answer to the prompt at `index`, or why there is none."""

    index: int
    completion: Completion | None
    error: KVFerryError | None = None


def new_job_id() -> str:
    """Short enough to be typed, long enough to be a tenant's only one."""
    return f"job-{uuid.uuid4().hex[:16]}"


def info_from_pb(job: pb.Job) -> JobInfo:
    usage = job.usage
    return JobInfo(
        id=job.job_id,
        status=cast(JobStatus, pb.JobStatus.Name(job.status).removeprefix("JOB_STATUS_").lower()),
        num_prompts=job.num_prompts,
        num_answered=job.num_answered,
        num_failed=job.num_failed,
        usage=Usage(usage.num_prompt_tokens, usage.num_completion_tokens, usage.num_cached_tokens),
        timeline=timeline_from_pb(job.timeline),
        created_s=job.created_s,
        finished_s=job.finished_s if job.HasField("finished_s") else None,
        expires_s=job.expires_s if job.HasField("expires_s") else None,
    )


def result_from_pb(result: pb.JobResult) -> JobResult:
    if result.HasField("error"):
        told = result.error
        cls = BY_NAME.get(told.type, KVFerryError)
        return JobResult(result.index, None, cls(told.message, param=told.param or None, code=told.code or None))
    return JobResult(result.index, completion_of([chunk_from_pb(choice) for choice in result.choices]))
