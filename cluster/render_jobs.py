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
    """Within 80 columns a job of the most prompts has one line, if its id is one that our client chose."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    # Another's id may be longer, and nothing else gives way to it.
    table.add_column("job", overflow="fold")
    table.add_column("status", no_wrap=True)
    for name in ("answered", "failed", "tokens", "submitted", "kept until"):
        table.add_column(name, justify="right", no_wrap=True)
    for info in infos:
        answered = f"{info.num_answered}/{info.num_prompts}"
        tokens = _short(info.usage.num_completion_tokens)
        times = (info.created_s, info.expires_s)
        table.add_row(info.id, info.status, answered, str(info.num_failed), tokens, *map(_local_time, times))
    return table


def _short(count: int) -> str:
    """At most six characters."""
    for unit, size in (("G", 10**9), ("M", 10**6)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)


def _local_time(at_s: float | None) -> str:
    return "" if at_s is None else time.strftime("%m-%d %H:%M", time.localtime(at_s))
