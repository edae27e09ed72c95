"""What a tenant's jobs take of the disk: their prompts, and the answers in place of these, until they are removed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from router.jobs.database import one_at_a_time
from router.jobs.tables import JobRow
from workers.errors import InvalidRequestError

# About what a row takes beside its body.
ROW_BYTES = 256
_MEND = "wait for jobs to end, and delete those, or output files of batches, that are read (else jobs.ttl_s does)"


def bytes_of(details: Mapping[str, Any], prompts: Iterable[bytes]) -> int:
    """Of a new job."""
    return ROW_BYTES + len(json.dumps(details)) + sum(ROW_BYTES + len(prompt) for prompt in prompts)


def bytes_in(bodies: InstrumentedAttribute[bytes]) -> ColumnElement[int]:
    """The same of all chosen rows, in the database."""
    return func.coalesce(func.sum(func.length(bodies) + ROW_BYTES), 0)


def has_room_for(session: Session, tenant: str, num_bytes: int, max_bytes: int) -> bool:
    return _num_bytes(session, tenant) + num_bytes <= max_bytes


def require_room(session: Session, tenant: str, num_bytes: int, max_bytes: int, param: str) -> None:
    """Until the transaction ends. Raises InvalidRequestError."""
    one_at_a_time(session, tenant)
    if not has_room_for(session, tenant, num_bytes, max_bytes):
        raise no_room_error(
            f"your jobs take {_num_bytes(session, tenant)} bytes, and {num_bytes} more are over", max_bytes, param
        )


def no_room_error(what: str, max_bytes: int, param: str | None = None) -> InvalidRequestError:
    return InvalidRequestError(
        f"{what} {max_bytes} (jobs.max_tenant_job_bytes): {_MEND}", param=param, code="job_quota_exceeded"
    )


def _num_bytes(session: Session, tenant: str) -> int:
    return session.scalar(select(func.sum(JobRow.num_bytes)).where(JobRow.tenant == tenant)) or 0
