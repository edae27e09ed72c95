"""A job's answers, some at a time: few enough for the router's memory and for one message."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from router.jobs.tables import AnswerRow

_PAGE_BYTES = 4 << 20


def page_of(session: Session, limit: int, *which: ColumnElement[bool]) -> Sequence[AnswerRow]:
    """The first of those that `which` chooses: up to `limit`, and 4 MiB together; or one, however large."""
    sizes = select(AnswerRow.place, func.length(AnswerRow.body)).where(*which).order_by(AnswerRow.place).limit(limit)
    last, num_bytes = -1, 0
    for place, size in session.execute(sizes):
        num_bytes += size
        if last >= 0 and num_bytes > _PAGE_BYTES:
            break
        last = place
    return session.scalars(select(AnswerRow).where(*which, AnswerRow.place <= last).order_by(AnswerRow.place)).all()
