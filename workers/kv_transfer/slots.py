"""From token positions to places in the pool: slot = block_id * block_size + offset."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Slots = Sequence[int] | npt.NDArray[np.int64]


def slots_of(block_table: Sequence[int], start: int, end: int, block_size: int) -> npt.NDArray[np.int64]:
    """Slots of positions [start, end)."""
    first = start // block_size
    blocks = np.asarray(block_table[first : -(-end // block_size)], np.int64)
    slots = (blocks[:, None] * block_size + np.arange(block_size)).reshape(-1)
    return slots[start - first * block_size : end - first * block_size]
