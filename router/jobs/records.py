"""What jobs, their prompts and their answers are to everybody but the database."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workers.timeline import Timeline

# Requests that a person waits for have 0; lower goes first.
JOB_PRIORITY = 100


class JobStatus(enum.StrEnum):
    RUNNING = "running"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    # Its time was over before all prompts were answered.
    EXPIRED = "expired"
    # There was nothing in it that could be answered.
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class NewJob:
    tenant: str
    id: str
    # Who can run its prompts and read its answers: the native API, or an endpoint of the HTTP API.
    kind: str
    # None: it has failed before it began.
    prompts: Sequence[bytes]
    # What its API wants back.
    details: Mapping[str, Any] = field(default_factory=dict)
    # From now until it is given up; None: as long as it takes.
    time_limit_s: float | None = None
    priority: int = JOB_PRIORITY
    # The parameter that its prompts came in.
    param: str = "requests"


@dataclass(frozen=True, slots=True)
class Used:
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0
    timeline: Timeline = field(default_factory=Timeline)


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job as it stands. Times are Unix times."""

    key: int
    tenant: str
    id: str
    kind: str
    status: JobStatus
    num_prompts: int
    num_answered: int
    num_failed: int
    used: Used
    details: Mapping[str, Any]
    created_s: float
    finished_s: float | None
    # Until then it and its answers can be read.
    expires_s: float | None

    @property
    def ended(self) -> bool:
        return self.status is not JobStatus.RUNNING


@dataclass(frozen=True, slots=True)
class Claim:
    """A prompt that is this router's to answer for as long as its lease lasts."""

    job_key: int
    index: int
    job_id: str
    tenant: str
    kind: str
    body: bytes
    # How often it was claimed, this time included.
    num_attempts: int
    priority: int = JOB_PRIORITY
    # Whether its tenant's jobs have room on the disk for an answer.
    has_room: bool = True

    @property
    def key(self) -> tuple[int, int]:
        return self.job_key, self.index

    @property
    def request_id(self) -> str:
        """A function of job and index, and with it the seed: whoever answers after a crash draws the same tokens."""
        return f"{self.job_id}.{self.index}"


@dataclass(frozen=True, slots=True)
class Answer:
    body: bytes
    failed: bool = False
    used: Used = field(default_factory=Used)


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """`place` counts a job's answers in the order in which they came."""

    place: int
    index: int
    body: bytes
    failed: bool
