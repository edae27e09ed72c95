"""What the command line shows of jobs."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from rich.table import Table

from cluster.client import Completion, JobInfo, JobResult


def job_object(info: JobInfo) -> dict[str, Any]:
    return {**asdict(info), "progress": info.progress}


def result_object(result: JobResult) -> dict[str, Any]:
    """A line of `--output`."""
    if result.error is not None:
        error = result.error
        told = {"type": type(error).__name__, "message": error.message, "param": error.param, "code": error.code}
        return {"index": result.index, "error": told}
    assert result.completion is not None
    completion = result.completion
    shown = {"index": result.index, **_answer_object(completion)}
    if completion.choices:
        shown["choices"] = [_answer_object(choice) for choice in completion.choices]
    return shown


def _answer_object(completion: Completion) -> dict[str, Any]:
    return {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason.value,
        "usage": asdict(completion.usage),
    }


def jobs_table(infos: Iterable[JobInfo]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("job", no_wrap=True)
    for name in ("status", "prompts", "answered", "failed", "tokens", "submitted", "readable until"):
        table.add_column(name, justify="right", no_wrap=name == "status")
    for info in infos:
        counts = (info.num_prompts, info.num_answered, info.num_failed, info.usage.num_completion_tokens)
        times = (info.created_s, info.expires_s)
        table.add_row(info.id, info.status, *map(str, counts), *map(_local_time, times))
    return table


def _local_time(at_s: float | None) -> str:
    return "" if at_s is None else time.strftime("%m-%d %H:%M", time.localtime(at_s))
