"""Uploaded files, and those that a job's answers are read as."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from functools import partial

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session, defer

from router.jobs.database import Database, one_at_a_time
from router.jobs.end import drop_answers
from router.jobs.pages import page_of
from router.jobs.room import ROW_BYTES
from router.jobs.store import Clock
from router.jobs.tables import AnswerRow, FileRow
from workers.errors import InvalidRequestError, NotFoundError

# Answers read at once.
_PAGE = 200


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Times are Unix times."""

    id: str
    purpose: str
    filename: str
    num_bytes: int
    created_s: float
    expires_s: float


class FileStore:
    """A tenant sees its own files only."""

    def __init__(self, database: Database, ttl_s: float, quota_bytes: int, clock: Clock = time.time) -> None:
        """`quota_bytes`: of all uploaded files of one tenant."""
        self._database = database
        self._ttl_s = ttl_s
        self._quota_bytes = quota_bytes
        self._clock = clock

    async def add(self, tenant: str, purpose: str, filename: str, content: bytes) -> FileRecord:
        """On disk when this returns. Raises InvalidRequestError when the tenant has no room left for it."""
        now_s = self._clock()
        row = FileRow(
            tenant=tenant,
            id=f"file-{uuid.uuid4().hex}",
            purpose=purpose,
            filename=filename,
            num_bytes=len(content),
            created_s=now_s,
            expires_s=now_s + self._ttl_s,
            content=content,
        )

        def add(session: Session) -> FileRecord:
            _require_room(session, tenant, len(content), self._quota_bytes)
            session.add(row)
            session.flush()
            return _record(row)

        return await self._database.run(add)

    async def get(self, tenant: str, file_id: str) -> FileRecord:
        """Raises NotFoundError."""
        return await self._database.run(lambda session: _record(_row(session, tenant, file_id)))

    async def list(self, tenant: str, purpose: str, limit: int, after: str, ascending: bool) -> list[FileRecord]:
        """`purpose`: empty: any; `after`: the id of the last one of the page before."""

        def find(session: Session) -> list[FileRecord]:
            chosen = select(FileRow).options(defer(FileRow.content)).where(FileRow.tenant == tenant)
            if purpose:
                chosen = chosen.where(FileRow.purpose == purpose)
            if after:
                key = _row(session, tenant, after, "after").key
                chosen = chosen.where(FileRow.key > key if ascending else FileRow.key < key)
            order = FileRow.key.asc() if ascending else FileRow.key.desc()
            return [_record(row) for row in session.scalars(chosen.order_by(order).limit(limit))]

        return await self._database.run(find)

    async def delete(self, tenant: str, file_id: str) -> None:
        """Also what it shows of a job's answers."""

        def remove(session: Session) -> None:
            row = _row(session, tenant, file_id)
            if row.job_key is not None:
                drop_answers(session, row.job_key, row.failed)
            session.execute(delete(FileRow).where(FileRow.key == row.key))

        await self._database.run(remove)

    async def read(self, tenant: str, file_id: str, param: str) -> bytes:
        """An uploaded file. `param`: who names it."""
        return await self._database.run(lambda session: _row(session, tenant, file_id, param).content or b"")

    async def content(self, tenant: str, file_id: str) -> AsyncGenerator[bytes, None]:
        """In pieces. Raises NotFoundError, also when the file goes meanwhile: what came of it is not the whole."""
        place: int | None = 0
        while place is not None:
            find = partial(_piece, tenant=tenant, file_id=file_id, start=place)
            piece, place = await self._database.run(find)
            yield piece


def _require_room(session: Session, tenant: str, num_bytes: int, quota_bytes: int) -> None:
    one_at_a_time(session, tenant)
    # What shows a job's answers is no copy.
    uploaded = select(func.sum(FileRow.num_bytes + ROW_BYTES)).where(
        FileRow.tenant == tenant, FileRow.job_key.is_(None)
    )
    num_there, num_bytes = session.scalar(uploaded) or 0, num_bytes + ROW_BYTES
    if num_there + num_bytes > quota_bytes:
        raise InvalidRequestError(
            f"your files take {num_there} bytes, and {num_bytes} more are over {quota_bytes} "
            "(jobs.max_tenant_file_bytes): delete some that no batch needs any more",
            param="file",
            code="file_quota_exceeded",
        )


def _row(session: Session, tenant: str, file_id: str, param: str = "file_id") -> FileRow:
    chosen = select(FileRow).options(defer(FileRow.content))
    row = session.scalar(chosen.where(FileRow.tenant == tenant, FileRow.id == file_id))
    if row is None:
        raise NotFoundError(f"there is no file {file_id[:100]!r}; it may have expired", param=param)
    return row


def _piece(session: Session, tenant: str, file_id: str, start: int) -> tuple[bytes, int | None]:
    """All of an uploaded file, or answers from place `start` on; and where the next piece starts. None: nowhere."""
    row = _row(session, tenant, file_id)
    if row.job_key is None:
        return row.content or b"", None
    which = (AnswerRow.job_key == row.job_key, AnswerRow.failed == row.failed, AnswerRow.place >= start)
    page = page_of(session, _PAGE, *which)
    return b"".join(answer.body + b"\n" for answer in page), page[-1].place + 1 if page else None


def _record(row: FileRow) -> FileRecord:
    return FileRecord(row.id, row.purpose, row.filename, row.num_bytes, row.created_s, row.expires_s)
