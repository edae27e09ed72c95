"""Azure's published traces of production traffic: when requests came and how long they were, without their text."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TraceRequest:
    # Seconds after the first request of the trace.
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


def read_azure_trace(path: Path) -> list[TraceRequest]:
    """In order of arrival. The file's columns: TIMESTAMP, ContextTokens, GeneratedTokens."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    # datetime knows microseconds; the file has a digit more.
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in rows]
    return [
        TraceRequest((time - times[0]).total_seconds(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        for time, row in zip(times, rows, strict=True)
    ]
