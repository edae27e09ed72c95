"""OpenAI's /v1/batches: jobs whose prompts are the lines of a file."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from starlette.responses import JSONResponse, Response

from router.batches.file_store import FileStore
from router.batches.files import page_limit, page_object
from router.batches.lines import parse_lines
from router.http.answers import read_json
from router.jobs.end import ERROR_FILE, OUTPUT_FILE
from router.jobs.records import JobRecord, JobStatus, NewJob
from router.jobs.runner import Jobs
from router.jobs.store import JobStore
from router.jobs.tenant import calling_priority, calling_tenant
from workers.errors import InvalidRequestError, NotFoundError

_WINDOWS_S = {"24h": 86_400.0}
_LONGEST_PAGE = 100
_PAGE = 20
# OpenAI's, of metadata.
_MAX_KEY, _MAX_VALUE = 64, 512
_STATUSES = {
    JobStatus.RUNNING: "in_progress",
    JobStatus.COMPLETED: "completed",
    JobStatus.CANCELLED: "cancelled",
    JobStatus.EXPIRED: "expired",
    JobStatus.FAILED: "failed",
}


class BatchBody(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = Field(default=None, max_length=16)

    @field_validator("metadata")
    @classmethod
    def _short_text(cls, metadata: dict[str, str] | None) -> dict[str, str] | None:
        for key, value in (metadata or {}).items():
            is_text = not any("\ud800" <= char <= "\udfff" for char in key + value)
            if not is_text or len(key) > _MAX_KEY or len(value) > _MAX_VALUE:
                raise ValueError(f"keys are text of up to {_MAX_KEY} characters, values of up to {_MAX_VALUE}")
        return metadata


class Batches:
    """Jobs of the kinds `endpoints`, as batches."""

    def __init__(self, store: JobStore, files: FileStore, endpoints: Sequence[str], max_num_prompts: int) -> None:
        self._store = store
        self._files = files
        self._endpoints = tuple(endpoints)
        self._max_num_prompts = max_num_prompts

    async def create(self, tenant: str, body: BatchBody) -> JobRecord:
        """Raises InvalidRequestError. What is wrong with the file's lines is told by a batch that has failed."""
        if body.endpoint not in self._endpoints:
            raise InvalidRequestError(
                f"endpoint is {body.endpoint[:80]!r}; supported: {', '.join(self._endpoints)}", param="endpoint"
            )
        if body.completion_window not in _WINDOWS_S:
            raise InvalidRequestError("completion_window must be 24h", param="completion_window")
        content = await self._files.read(tenant, body.input_file_id, param="input_file_id")
        parsed = await asyncio.to_thread(parse_lines, content, body.endpoint, self._max_num_prompts)
        details = {**body.model_dump(), "errors": [problem.to_json() for problem in parsed.problems]}
        details |= {name: f"file-{uuid.uuid4().hex}" for name in (OUTPUT_FILE, ERROR_FILE)}
        prompts = [] if parsed.problems else parsed.prompts
        return await self._store.add(
            NewJob(
                tenant=tenant,
                id=f"batch_{uuid.uuid4().hex}",
                kind=body.endpoint,
                prompts=prompts,
                details=details,
                time_limit_s=_WINDOWS_S[body.completion_window],
                priority=calling_priority(),
                param="input_file_id",
            )
        )

    async def get(self, tenant: str, batch_id: str) -> JobRecord:
        try:
            job = await self._store.get(tenant, batch_id)
        except NotFoundError:
            raise NotFoundError(
                f"there is no batch {batch_id[:100]!r}; it may have expired", param="batch_id"
            ) from None
        if job.kind not in self._endpoints:
            raise InvalidRequestError(f"{batch_id} is a job of the native API, not a batch", param="batch_id")
        return job

    async def list(self, tenant: str, limit: int, after: str) -> list[JobRecord]:
        return await self._store.list(tenant, self._endpoints, limit, after)

    async def cancel(self, tenant: str, batch_id: str) -> JobRecord:
        await self.get(tenant, batch_id)
        return await self._store.cancel(tenant, batch_id)


def add_batch_routes(app: FastAPI, batches: Batches, jobs: Jobs) -> None:
    @app.post("/v1/batches")
    async def create(request: Request) -> Response:
        batch = await batches.create(calling_tenant(), _body(await read_json(request)))
        jobs.wake()
        return JSONResponse(_object(batch))

    @app.get("/v1/batches")
    async def page(request: Request) -> Response:
        limit = page_limit(request.query_params.get("limit", str(_PAGE)), _LONGEST_PAGE)
        found = await batches.list(calling_tenant(), limit + 1, request.query_params.get("after", ""))
        return JSONResponse(page_object([_object(one) for one in found], limit))

    @app.get("/v1/batches/{batch_id}")
    async def batch(batch_id: str) -> Response:
        return JSONResponse(_object(await batches.get(calling_tenant(), batch_id)))

    @app.post("/v1/batches/{batch_id}/cancel")
    async def cancel(batch_id: str) -> Response:
        cancelled = await batches.cancel(calling_tenant(), batch_id)
        jobs.drop(cancelled.key)
        return JSONResponse(_object(cancelled))


def _body(fields: dict[str, Any]) -> BatchBody:
    try:
        return BatchBody.model_validate(fields)
    except ValidationError as exc:
        problem = exc.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, problem["loc"]))
        raise InvalidRequestError(f"{where}: {problem['msg'].lower()}", param=where.partition(".")[0]) from None


def _object(job: JobRecord) -> dict[str, Any]:
    details, ended_at = job.details, None if job.finished_s is None else int(job.finished_s)
    problems = details["errors"]
    ends = {f"{status.value}_at": ended_at if job.status is status else None for status in JobStatus if status in _ENDS}
    return {
        "id": job.id,
        "object": "batch",
        "endpoint": job.kind,
        "errors": {"object": "list", "data": problems} if problems else None,
        "input_file_id": details["input_file_id"],
        "completion_window": details["completion_window"],
        "status": _STATUSES[job.status],
        OUTPUT_FILE: details[OUTPUT_FILE] if job.ended and job.num_answered > job.num_failed else None,
        ERROR_FILE: details[ERROR_FILE] if job.ended and job.num_failed else None,
        "created_at": int(job.created_s),
        "in_progress_at": None if problems else int(job.created_s),
        "expires_at": int(job.created_s + _WINDOWS_S[details["completion_window"]]),
        "finalizing_at": ended_at if job.status is JobStatus.COMPLETED else None,
        "cancelling_at": ended_at if job.status is JobStatus.CANCELLED else None,
        **ends,
        "request_counts": {
            "total": job.num_prompts,
            "completed": job.num_answered - job.num_failed,
            "failed": job.num_failed,
        },
        "metadata": details["metadata"],
    }


_ENDS = set(JobStatus) - {JobStatus.RUNNING}
