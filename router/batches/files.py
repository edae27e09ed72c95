"""OpenAI's /v1/files: what batches are made of, and what comes out of them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Message, Receive

from router.batches.file_store import FileRecord, FileStore
from router.jobs.tenant import calling_tenant
from workers.errors import InvalidRequestError

# Of a multipart body, beside the file.
_ENVELOPE_BYTES = 64 << 10
_MAX_FILENAME = 255
_LONGEST_PAGE = 10_000


def add_file_routes(app: FastAPI, files: FileStore, max_file_bytes: int) -> None:
    @app.post("/v1/files")
    async def upload(request: Request) -> Response:
        filename, content, purpose = await _uploaded(request, max_file_bytes)
        return JSONResponse(_object(await files.add(calling_tenant(), purpose, filename, content)))

    @app.get("/v1/files")
    async def page(request: Request) -> Response:
        query = request.query_params
        limit = page_limit(query.get("limit"), _LONGEST_PAGE)
        ascending = query.get("order", "desc") == "asc"
        purpose, after = query.get("purpose", ""), query.get("after", "")
        found = await files.list(calling_tenant(), purpose, limit + 1, after, ascending)
        return JSONResponse(page_object([_object(one) for one in found], limit))

    @app.get("/v1/files/{file_id}")
    async def file(file_id: str) -> Response:
        return JSONResponse(_object(await files.get(calling_tenant(), file_id)))

    @app.delete("/v1/files/{file_id}")
    async def delete(file_id: str) -> Response:
        await files.delete(calling_tenant(), file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    @app.get("/v1/files/{file_id}/content")
    async def content(file_id: str) -> Response:
        # Before the first byte, so that what is not there is a 404, and what goes meanwhile is too short.
        file = await files.get(calling_tenant(), file_id)
        return StreamingResponse(
            files.content(calling_tenant(), file_id),
            headers={"Content-Length": str(file.num_bytes)},
            media_type="application/octet-stream",
        )


def page_limit(given: str | None, longest: int) -> int:
    if given is None:
        return longest
    if not given.isdecimal() or not 1 <= int(given) <= longest:
        raise InvalidRequestError(f"limit is {given[:40]!r}; it must be 1 to {longest}", param="limit")
    return int(given)


def page_object(objects: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    """OpenAI's list, of objects of which one too many tells that there are more."""
    shown = objects[:limit]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    return {"object": "list", "data": shown, **ends, "has_more": len(objects) > limit}


def _object(file: FileRecord) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": int(file.created_s),
        "expires_at": int(file.expires_s),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }


async def _uploaded(request: Request, max_bytes: int) -> tuple[str, bytes, str]:
    """File name, content and purpose. Raises InvalidRequestError, HTTPException for what is too large or no form."""
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise InvalidRequestError("send multipart/form-data with the fields file and purpose")
    limited = Request(request.scope, _limited(request.receive, max_bytes + _ENVELOPE_BYTES, max_bytes))
    async with limited.form(max_files=1, max_fields=8) as form:
        file, purpose = form.get("file"), form.get("purpose")
        if not isinstance(file, UploadFile):
            raise InvalidRequestError("there is no field `file` with a file; send one", param="file")
        if purpose != "batch":
            raise InvalidRequestError(f"purpose is {str(purpose)[:40]!r}; supported: batch", param="purpose")
        content = await file.read()
        if len(content) > max_bytes:
            raise _too_large(max_bytes)
        return _printable(file.filename or "upload.jsonl"), content, purpose


def _printable(filename: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in filename)[:_MAX_FILENAME]


def _limited(receive: Receive, limit: int, max_bytes: int) -> Receive:
    """Raises HTTPException once more than `limit` bytes have come."""
    num_bytes = 0

    async def limited() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > limit:
            raise _too_large(max_bytes)
        return message

    return limited


def _too_large(max_bytes: int) -> HTTPException:
    return HTTPException(413, f"the file is over {max_bytes} bytes (jobs.max_file_bytes); send several smaller ones")
