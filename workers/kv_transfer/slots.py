"""From token positions to places in the pool: slot = block_id * block_size + offset."""

from __future__ import annotations

from collections.abc import Sequence


def slots_of(block_table: Sequence[int], start: int, end: int, block_size: int) -> list[int]:
    """Slots of positions [start, end)."""
    return [block_table[p // block_size] * block_size + p % block_size for p in range(start, end)]
