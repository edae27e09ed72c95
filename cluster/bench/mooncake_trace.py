"""Mooncake's published traces: when requests came, and which blocks of their prompts are alike.

Qin et al., "Mooncake: Trading More Storage for Less Computation", FAST 2025.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# Prompt tokens for which one id stands.
BLOCK_TOKENS = 512
# Of the clock by which arrivals were written down.
_TICK_S = 3.0


@dataclass(frozen=True, slots=True)
class TraceRequest:
    arrival_s: float
    # Each stands for a block of the prompt and all before it: equal ids, equal KV.
    block_ids: tuple[int, ...]


def read_mooncake_trace(path: Path) -> list[TraceRequest]:
    """In order of arrival; those of one tick are spread evenly over it."""
    with path.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return list(_spread(rows))


def _spread(rows: Sequence[dict[str, object]]) -> Iterator[TraceRequest]:
    for tick_ms, group in itertools.groupby(rows, key=lambda row: row["timestamp"]):
        together = list(group)
        assert isinstance(tick_ms, int)
        for i, row in enumerate(together):
            ids = row["hash_ids"]
            assert isinstance(ids, list)
            yield TraceRequest(tick_ms / 1000 + i * _TICK_S / len(together), tuple(ids))


def ceiling(requests: Sequence[TraceRequest]) -> float:
    """The part of all blocks that one cache without bounds would have when they are asked for."""
    seen: set[int] = set()
    num_blocks = num_hits = 0
    for request in requests:
        num_blocks += len(request.block_ids)
        num_hits += sum(block_id in seen for block_id in request.block_ids)
        seen.update(request.block_ids)
    return num_hits / num_blocks
