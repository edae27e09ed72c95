"""The lines of a batch: from an input file to prompts, and from answers to lines of its output files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

# A file that is wrong throughout needs no longer list.
_MAX_PROBLEMS = 100
_MAX_CUSTOM_ID = 512


@dataclass(frozen=True, slots=True)
class Problem:
    """Of a line, counted from 1; None: of the file."""

    line: int | None
    code: str
    message: str
    param: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {"line": self.line, "code": self.code, "message": self.message, "param": self.param}


@dataclass(frozen=True, slots=True)
class BatchLines:
    """A prompt for each line, or what is wrong with them."""

    prompts: list[bytes]
    problems: list[Problem]


def parse_lines(content: bytes, endpoint: str, max_num_prompts: int) -> BatchLines:
    prompts: list[bytes] = []
    problems: list[Problem] = []
    seen: set[str] = set()
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        parsed = _parsed(line, number, endpoint, seen)
        if isinstance(parsed, bytes):
            prompts.append(parsed)
        else:
            problems.append(parsed)
        if len(problems) == _MAX_PROBLEMS:
            break
    if not problems and not prompts:
        problems.append(Problem(None, "empty_file", "the input file has no lines; give it one request a line"))
    if len(prompts) > max_num_prompts:
        reason = f"the input file has {len(prompts)} lines; at most {max_num_prompts} (jobs.max_num_prompts)"
        problems.append(Problem(None, "too_many_requests", reason))
    return BatchLines(prompts, problems)


def _parsed(line: bytes, number: int, endpoint: str, seen: set[str]) -> bytes | Problem:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as exc:
        return Problem(number, "invalid_json_line", f"this line is not valid JSON: {exc}")
    if not isinstance(fields, dict):
        return Problem(number, "invalid_json_line", "this line is no JSON object")
    custom_id, body = fields.get("custom_id"), fields.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MAX_CUSTOM_ID:
        return Problem(number, "missing_required_parameter", "custom_id must be a string, not empty", "custom_id")
    if custom_id in seen:
        return Problem(number, "duplicate_custom_id", f"custom_id {custom_id!r} is used before", "custom_id")
    if fields.get("method") != "POST":
        return Problem(number, "invalid_method", "method must be POST", "method")
    if fields.get("url") != endpoint:
        return Problem(number, "mismatched_endpoint", f"url must be the batch's endpoint, {endpoint}", "url")
    if not isinstance(body, dict):
        return Problem(number, "missing_required_parameter", "body must be a JSON object", "body")
    if body.get("stream"):
        return Problem(number, "invalid_request", "a batch does not stream; leave out stream", "body.stream")
    seen.add(custom_id)
    return json.dumps({"custom_id": custom_id, "body": body}, separators=(",", ":")).encode()


def output_line(custom_id: str, request_id: str, status: int, body: dict[str, Any]) -> bytes:
    line = {
        "id": f"batch_req_{request_id}",
        "custom_id": custom_id,
        "response": {"status_code": status, "request_id": request_id, "body": body},
        "error": None,
    }
    return json.dumps(line, separators=(",", ":")).encode()
