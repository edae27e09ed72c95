"""One database of jobs with routers at it, at a time that the test chooses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from router.config import JobsConfig
from router.jobs.database import Database
from router.jobs.queue import JobQueue
from router.jobs.records import Answer, Claim, NewJob, Used
from router.jobs.store import JobStore
from workers.timeline import Timeline

LEASE_S, TTL_S = 10.0, 100.0


@dataclass
class Shared:
    """One database and routers at it, each with a connection of its own; the time is what the test says."""

    url: str
    config: JobsConfig
    now_s: float = 1000.0
    databases: list[Database] = field(default_factory=list)

    def _database(self) -> Database:
        self.databases.append(Database(self.url))
        return self.databases[-1]

    def queue(self, owner: str) -> JobQueue:
        return JobQueue(self._database(), owner, self.config, lambda: self.now_s)

    def store(self) -> JobStore:
        return JobStore(self._database(), self.config, lambda: self.now_s)


@asynccontextmanager
async def shared(url: str, **settings: Any) -> AsyncIterator[Shared]:
    """`settings`: of JobsConfig."""
    one = Shared(url, JobsConfig(lease_s=LEASE_S, ttl_s=TTL_S, **settings))
    try:
        yield one
    finally:
        for database in one.databases:
            await database.close()


def job_of(count: int, job_id: str = "job", **fields: Any) -> NewJob:
    return NewJob("", job_id, "generate", [f"{job_id} {at}".encode() for at in range(count)], **fields)


def answer_of(claim: Claim, by: str) -> Answer:
    return Answer(f"{claim.index} by {by}".encode(), used=Used(2, 3, 1, Timeline(prefill_s=0.5)))
