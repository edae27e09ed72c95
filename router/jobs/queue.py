"""The prompts still to be answered, as routers share them: claimed by lease, answered once."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import asdict

from sqlalchemy import Row, Select, Update, delete, func, select, tuple_, update
from sqlalchemy.orm import Session

from router.config import JobsConfig
from router.jobs.database import Database
from router.jobs.end import end_job
from router.jobs.records import JOB_PRIORITY, Answer, Claim, JobStatus
from router.jobs.room import has_room_for
from router.jobs.store import Clock
from router.jobs.tables import PRIORITY, AnswerRow, FileRow, JobRow, PromptRow
from workers.timeline import Timeline


class JobQueue:
    """A lease may end while its router still works: then two answer, and the first answer stays."""

    def __init__(self, database: Database, owner: str, config: JobsConfig, clock: Clock = time.time) -> None:
        """`owner`: the incarnation of the router that claims."""
        self._database = database
        self._owner = owner
        self._config = config
        self._clock = clock

    async def claim(self, limit: int) -> list[Claim]:
        """Up to so many prompts that nobody has."""
        return await self._database.run(lambda session: self._claim(session, limit))

    async def renew(self, keys: Collection[tuple[int, int]]) -> set[tuple[int, int]]:
        """Hold these for a lease more. The keys of those that are held: of the others the lease is lost, or the job was
        cancelled."""
        row_key = tuple_(PromptRow.job_key, PromptRow.position)
        held = (PromptRow.owner == self._owner) & row_key.in_(list(keys))

        def renew(session: Session) -> set[tuple[int, int]]:
            session.execute(update(PromptRow).where(held).values(leased_until_s=self._clock() + self._config.lease_s))
            return {(key, at) for key, at in session.execute(select(PromptRow.job_key, PromptRow.position).where(held))}

        return await self._database.run(renew) if keys else set()

    async def release(self, claim: Claim, after_s: float, *, uncounted: bool = False) -> None:
        """Somebody is to try it again, after a while; `uncounted`: this try was none."""
        values = {
            "owner": None,
            "leased_until_s": self._clock() + after_s,
            "num_attempts": claim.num_attempts - uncounted,
        }
        await self._database.run(lambda session: session.execute(self._held(claim).values(**values)))

    async def release_all(self) -> None:
        """This router goes: others need not wait for its leases to end."""
        mine = update(PromptRow).where(PromptRow.owner == self._owner)
        gone = mine.values(owner=None, leased_until_s=0.0, num_attempts=PromptRow.num_attempts - 1)
        await self._database.run(lambda session: session.execute(gone))

    async def answer(self, claim: Claim, answer: Answer) -> bool:
        """Whether it was the first; only that one is kept. The last one ends its job."""
        return await self._database.run(lambda session: self._answer(session, claim, answer))

    async def sweep(self) -> None:
        """Give up what is due, remove what has expired."""
        await self._database.run(self._sweep)

    def _held(self, claim: Claim) -> Update:
        return update(PromptRow).where(
            PromptRow.job_key == claim.job_key, PromptRow.position == claim.index, PromptRow.owner == self._owner
        )

    def _claim(self, session: Session, limit: int) -> list[Claim]:
        """The tenant goes next that has the fewest prompts at work; of one tenant's jobs each has its turn."""
        now_s = self._clock()
        # Of jobs that run.
        tenants = session.scalars(select(JobRow.tenant).where(JobRow.expires_s.is_(None)).distinct()).all()
        at_work = Counter(self._at_work(session, now_s) if len(tenants) > 1 else {})
        found: dict[str, deque[Row[PromptRow, JobRow]]] = {}
        for tenant in sorted(tenants, key=lambda one: at_work[one]):
            if rows := session.execute(self._free(tenant, now_s, limit)).all():
                found[tenant] = deque(rows)
            if len(found) == limit:
                break
        max_bytes = self._config.max_tenant_job_bytes
        has_room = {tenant: has_room_for(session, tenant, 1, max_bytes) for tenant in found}
        claims: list[Claim] = []
        while found and len(claims) < limit:
            tenant = min(found, key=lambda one: at_work[one])
            row, job = found[tenant].popleft()
            if not found[tenant]:
                del found[tenant]
            at_work[tenant] += 1
            row.owner, row.leased_until_s = self._owner, now_s + self._config.lease_s
            row.num_attempts += 1
            claims.append(_claim_of(row, job, has_room[tenant]))
        return claims

    def _free(self, tenant: str, now_s: float, limit: int) -> Select[PromptRow, JobRow]:
        return (
            select(PromptRow, JobRow)
            .join(JobRow, JobRow.key == PromptRow.job_key)
            .where(PromptRow.leased_until_s <= now_s)
            .where(JobRow.tenant == tenant)
            .order_by(PromptRow.position, PromptRow.job_key)
            .limit(limit)
            .with_for_update(of=PromptRow, skip_locked=True)
        )

    def _at_work(self, session: Session, now_s: float) -> dict[str, int]:
        """Prompts that some router has, by tenant."""
        held = (PromptRow.owner.is_not(None), PromptRow.leased_until_s > now_s)
        counted = select(JobRow.tenant, func.count()).join(PromptRow, JobRow.key == PromptRow.job_key).where(*held)
        return dict(session.execute(counted.group_by(JobRow.tenant)).all())

    def _answer(self, session: Session, claim: Claim, answer: Answer) -> bool:
        # Whoever removes the prompt is the one who answers it. The job first: everybody takes locks in this order.
        job = session.get(JobRow, claim.job_key, with_for_update=True)
        gone = delete(PromptRow).where(PromptRow.job_key == claim.job_key, PromptRow.position == claim.index)
        if job is None or not session.execute(gone.returning(PromptRow.position)).all():
            return False
        job.num_bytes = max(0, job.num_bytes + len(answer.body) - len(claim.body))
        session.add(
            AnswerRow(
                job_key=job.key, place=job.num_answered, position=claim.index, body=answer.body, failed=answer.failed
            )
        )
        used = answer.used
        job.num_answered += 1
        job.num_failed += answer.failed
        job.num_prompt_tokens += used.num_prompt_tokens
        job.num_completion_tokens += used.num_completion_tokens
        job.num_cached_tokens += used.num_cached_tokens
        job.timeline = asdict(Timeline(**job.timeline) + used.timeline)
        if job.num_answered == job.num_prompts:
            end_job(session, job, JobStatus.COMPLETED, self._clock(), self._config.ttl_s)
        return True

    def _sweep(self, session: Session) -> None:
        now_s = self._clock()
        due = select(JobRow).where(JobRow.status == JobStatus.RUNNING, JobRow.due_s <= now_s)
        for job in session.scalars(due.with_for_update(skip_locked=True)).all():
            end_job(session, job, JobStatus.EXPIRED, now_s, self._config.ttl_s)
        for table in (FileRow, JobRow):
            session.execute(delete(table).where(table.expires_s <= now_s))


def _claim_of(row: PromptRow, job: JobRow, has_room: bool) -> Claim:
    priority = job.details.get(PRIORITY, JOB_PRIORITY)
    return Claim(job.key, row.position, job.id, job.tenant, job.kind, row.body, row.num_attempts, priority, has_room)
