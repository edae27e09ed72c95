"""How a job ends, whoever ends it: nothing of it is left to answer, and its answers can be read for a while."""

from __future__ import annotations

from sqlalchemy import ColumnElement, delete, func, select
from sqlalchemy.orm import Session

from router.jobs.records import JobStatus
from router.jobs.room import bytes_in
from router.jobs.tables import AnswerRow, FileRow, JobRow, PromptRow

# In a job's details: ids of the files that its answers are to be read as, those that failed and the others.
OUTPUT_FILE, ERROR_FILE = "output_file_id", "error_file_id"


def end_job(session: Session, row: JobRow, status: JobStatus, now_s: float, ttl_s: float) -> None:
    row.status = status
    row.finished_s = now_s
    row.expires_s = now_s + ttl_s
    _drop(session, row, PromptRow, PromptRow.job_key == row.key)
    for name, failed in ((OUTPUT_FILE, False), (ERROR_FILE, True)):
        if file_id := row.details.get(name):
            _show_as_file(session, row, file_id, failed)


def drop_answers(session: Session, job_key: int, failed: bool) -> None:
    """Those that failed, or the others: nobody is to read them any more."""
    if row := session.get(JobRow, job_key, with_for_update=True):
        _drop(session, row, AnswerRow, AnswerRow.job_key == job_key, AnswerRow.failed == failed)


def _drop(session: Session, row: JobRow, table: type[PromptRow | AnswerRow], *which: ColumnElement[bool]) -> None:
    freed = session.scalar(select(bytes_in(table.body)).where(*which)) or 0
    row.num_bytes = max(0, row.num_bytes - freed)
    session.execute(delete(table).where(*which))


def _show_as_file(session: Session, row: JobRow, file_id: str, failed: bool) -> None:
    """None where it would be empty."""
    assert row.finished_s is not None
    assert row.expires_s is not None
    # Lines end in a character more.
    size = select(func.sum(func.length(AnswerRow.body) + 1)).where(
        AnswerRow.job_key == row.key, AnswerRow.failed == failed
    )
    session.flush()
    if num_bytes := session.scalar(size):
        session.add(
            FileRow(
                tenant=row.tenant,
                id=file_id,
                purpose="batch_output",
                filename=f"{row.id}_{'error' if failed else 'output'}.jsonl",
                num_bytes=num_bytes,
                created_s=row.finished_s,
                expires_s=row.expires_s,
                job_key=row.key,
                failed=failed,
            )
        )
