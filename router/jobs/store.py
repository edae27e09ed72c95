"""Durable jobs as their owners see them: put down, looked up, read, cancelled."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Sequence

from sqlalchemy import delete, insert, select
from sqlalchemy.orm import Session

from router.config import JobsConfig
from router.jobs.database import Database
from router.jobs.end import end_job
from router.jobs.pages import page_of
from router.jobs.records import JobRecord, JobStatus, NewJob, StoredAnswer, Used
from router.jobs.room import bytes_of, require_room
from router.jobs.tables import PRIORITY, AnswerRow, JobRow, PromptRow
from workers.errors import ConflictError, InvalidRequestError, NotFoundError
from workers.timeline import Timeline

Clock = Callable[[], float]


class JobStore:
    """A tenant sees its own jobs only. Times are Unix times: several routers, and one before and after a crash, have to
    agree on them."""

    def __init__(self, database: Database, config: JobsConfig, clock: Clock = time.time) -> None:
        self._database = database
        self._config = config
        self._clock = clock

    async def add(self, job: NewJob) -> JobRecord:
        """On disk when this returns. The same job again is no second one. Raises ConflictError when its id is
        another's, InvalidRequestError when the tenant's jobs leave it no room."""
        return await self._database.run(lambda session: _add(session, job, self._clock(), self._config))

    async def get(self, tenant: str, job_id: str) -> JobRecord:
        """Raises NotFoundError."""
        return await self._database.run(lambda session: _record(_row(session, tenant, job_id)))

    async def list(self, tenant: str, kinds: Collection[str], limit: int, after: str = "") -> list[JobRecord]:
        """The latest first; `after`: the id of the last one of the page before."""
        return await self._database.run(lambda session: _list(session, tenant, kinds, limit, after))

    async def cancel(self, tenant: str, job_id: str) -> JobRecord:
        """What has no answer yet gets none. To cancel what has ended changes nothing."""

        def cancel(session: Session) -> JobRecord:
            row = _row(session, tenant, job_id, for_update=True)
            if row.status == JobStatus.RUNNING:
                end_job(session, row, JobStatus.CANCELLED, self._clock(), self._config.ttl_s)
            return _record(row)

        return await self._database.run(cancel)

    async def delete(self, tenant: str, job_id: str) -> None:
        """With its answers. Raises InvalidRequestError while it runs."""

        def remove(session: Session) -> None:
            row = _row(session, tenant, job_id, for_update=True)
            if row.status == JobStatus.RUNNING:
                raise InvalidRequestError(f"job {job_id} has not ended; cancel it before", param="job_id")
            session.execute(delete(JobRow).where(JobRow.key == row.key))

        await self._database.run(remove)

    async def answers(
        self, tenant: str, job_id: str, start: int, limit: int
    ) -> tuple[JobRecord, Sequence[StoredAnswer]]:
        """The job, and its answers from place `start` on: up to `limit`, none only if none are there."""
        return await self._database.run(lambda session: _answers(session, _row(session, tenant, job_id), start, limit))


def _add(session: Session, job: NewJob, now_s: float, config: JobsConfig) -> JobRecord:
    digest = _digest(job)
    there = session.scalar(select(JobRow).where(JobRow.tenant == job.tenant, JobRow.id == job.id))
    if there is not None:
        if there.digest != digest:
            raise ConflictError(f"job {job.id} is there already, with other prompts; choose another id", param="job_id")
        return _record(there)
    details = {**job.details, PRIORITY: job.priority}
    num_bytes = bytes_of(details, job.prompts)
    require_room(session, job.tenant, num_bytes, config.max_tenant_job_bytes, job.param)
    row = JobRow(
        tenant=job.tenant,
        id=job.id,
        kind=job.kind,
        status=JobStatus.RUNNING,
        digest=digest,
        num_prompts=len(job.prompts),
        num_bytes=num_bytes,
        details=details,
        created_s=now_s,
        due_s=None if job.time_limit_s is None else now_s + job.time_limit_s,
    )
    session.add(row)
    session.flush()
    if job.prompts:
        rows = [{"job_key": row.key, "position": at, "body": body} for at, body in enumerate(job.prompts)]
        session.execute(insert(PromptRow), rows)
    else:
        end_job(session, row, JobStatus.FAILED, now_s, config.ttl_s)
    return _record(row)


def _digest(job: NewJob) -> str:
    digest = hashlib.sha256(job.kind.encode())
    for prompt in job.prompts:
        digest.update(len(prompt).to_bytes(8, "little") + prompt)
    return digest.hexdigest()


def _row(session: Session, tenant: str, job_id: str, for_update: bool = False, param: str = "job_id") -> JobRow:
    chosen = select(JobRow).where(JobRow.tenant == tenant, JobRow.id == job_id)
    row = session.scalar(chosen.with_for_update() if for_update else chosen)
    if row is None:
        raise NotFoundError(f"there is no job {job_id[:100]!r}; it may have expired", param=param)
    return row


def _list(session: Session, tenant: str, kinds: Collection[str], limit: int, after: str) -> list[JobRecord]:
    chosen = select(JobRow).where(JobRow.tenant == tenant, JobRow.kind.in_(kinds))
    if after:
        chosen = chosen.where(JobRow.key < _row(session, tenant, after, param="after").key)
    return [_record(row) for row in session.scalars(chosen.order_by(JobRow.key.desc()).limit(limit))]


def _answers(session: Session, row: JobRow, start: int, limit: int) -> tuple[JobRecord, Sequence[StoredAnswer]]:
    found = page_of(session, limit, AnswerRow.job_key == row.key, AnswerRow.place >= start)
    return _record(row), [StoredAnswer(one.place, one.position, one.body, one.failed) for one in found]


def _record(row: JobRow) -> JobRecord:
    used = Used(row.num_prompt_tokens, row.num_completion_tokens, row.num_cached_tokens, Timeline(**row.timeline))
    return JobRecord(
        key=row.key,
        tenant=row.tenant,
        id=row.id,
        kind=row.kind,
        status=JobStatus(row.status),
        num_prompts=row.num_prompts,
        num_answered=row.num_answered,
        num_failed=row.num_failed,
        used=used,
        details=row.details,
        created_s=row.created_s,
        finished_s=row.finished_s,
        expires_s=row.expires_s,
    )
