"""How a job ends, whoever ends it: nothing of it is left to answer, and its answers can be read for a while."""

from __future__ import annotations

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from router.jobs.records import JobStatus
from router.jobs.tables import AnswerRow, FileRow, JobRow, PromptRow

# In a job's details: ids of the files that its answers are to be read as, those that failed and the others.
OUTPUT_FILE, ERROR_FILE = "output_file_id", "error_file_id"


def end_job(session: Session, row: JobRow, status: JobStatus, now_s: float, ttl_s: float) -> None:
    row.status = status
    row.finished_s = now_s
    row.expires_s = now_s + ttl_s
    session.execute(delete(PromptRow).where(PromptRow.job_key == row.key))
    for name, failed in ((OUTPUT_FILE, False), (ERROR_FILE, True)):
        if file_id := row.details.get(name):
            _show_as_file(session, row, file_id, failed)


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
