"""The tables of durable jobs. A prompt is in `prompts` until its answer is in `answers`, never in both."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger, ForeignKey, Index, Integer, LargeBinary, String, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

# SQLite counts up only what is called INTEGER.
_Key = BigInteger().with_variant(Integer, "sqlite")


# In a job's details.
PRIORITY = "priority"


class Table(DeclarativeBase):
    pass


class JobRow(Table):
    __tablename__ = "jobs"
    # No key is used again: what comes late for a job that is no more never meets another one.
    __table_args__ = (UniqueConstraint("tenant", "id"), {"sqlite_autoincrement": True})

    key: Mapped[int] = mapped_column(_Key, primary_key=True)
    tenant: Mapped[str] = mapped_column(String)
    id: Mapped[str] = mapped_column(String)
    kind: Mapped[str] = mapped_column(String)
    status: Mapped[str] = mapped_column(String)
    # Of its prompts, so that the same job submitted twice is known.
    digest: Mapped[str] = mapped_column(String)
    num_prompts: Mapped[int]
    # What it takes of the disk (room.py).
    num_bytes: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    num_answered: Mapped[int] = mapped_column(default=0)
    num_failed: Mapped[int] = mapped_column(default=0)
    num_prompt_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    num_completion_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    num_cached_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    timeline: Mapped[dict[str, float]] = mapped_column(JSON, default=dict)
    details: Mapped[dict[str, Any]] = mapped_column(JSON, default=dict)
    # Unix times. Given up at due_s, removed at expires_s.
    created_s: Mapped[float]
    due_s: Mapped[float | None]
    finished_s: Mapped[float | None]
    expires_s: Mapped[float | None] = mapped_column(index=True)


class PromptRow(Table):
    __tablename__ = "prompts"
    # The order in which they are claimed: of all jobs the first prompts first, so that short jobs end soon.
    __table_args__ = (Index("prompts_in_turn", "position", "job_key"),)

    job_key: Mapped[int] = mapped_column(_Key, ForeignKey("jobs.key", ondelete="CASCADE"), primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True)
    body: Mapped[bytes] = mapped_column(LargeBinary)
    # The incarnation of the router that answers it.
    owner: Mapped[str | None] = mapped_column(String, default=None, index=True)
    # Nobody else may claim it before this Unix time.
    leased_until_s: Mapped[float] = mapped_column(default=0.0)
    num_attempts: Mapped[int] = mapped_column(default=0)


class AnswerRow(Table):
    __tablename__ = "answers"
    __table_args__ = (UniqueConstraint("job_key", "position"),)

    job_key: Mapped[int] = mapped_column(_Key, ForeignKey("jobs.key", ondelete="CASCADE"), primary_key=True)
    place: Mapped[int] = mapped_column(primary_key=True)
    position: Mapped[int]
    body: Mapped[bytes] = mapped_column(LargeBinary)
    failed: Mapped[bool]


class FileRow(Table):
    """An uploaded file, or the view of a job's answers as one."""

    __tablename__ = "files"
    __table_args__ = (UniqueConstraint("tenant", "id"),)

    key: Mapped[int] = mapped_column(_Key, primary_key=True)
    tenant: Mapped[str] = mapped_column(String)
    id: Mapped[str] = mapped_column(String)
    purpose: Mapped[str] = mapped_column(String)
    filename: Mapped[str] = mapped_column(String)
    num_bytes: Mapped[int] = mapped_column(BigInteger)
    created_s: Mapped[float]
    expires_s: Mapped[float] = mapped_column(index=True)
    # None where it shows a job's answers: those that failed, or the others.
    content: Mapped[bytes | None] = mapped_column(LargeBinary)
    job_key: Mapped[int | None] = mapped_column(_Key, ForeignKey("jobs.key", ondelete="CASCADE"))
    failed: Mapped[bool] = mapped_column(default=False)
