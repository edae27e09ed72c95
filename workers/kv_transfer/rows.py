"""Copies of many short rows of memory, as KV lies in blocks all over a pool."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
# What goes by way of the cache, and leaves room there for what else a core does.
_PIECE_BYTES = 768 << 10


def copy_with_numpy(target: Bytes, to: Rows, source: Bytes, of: Rows, row_bytes: int, stream: bool) -> None:
    """As the compiled one, at about half its rate."""
    if len(to) != len(of):
        raise ValueError(f"{len(of)} rows are to be copied to {len(to)}")
    targets, sources = _as_rows(target, row_bytes), _as_rows(source, row_bytes)
    for rows, there in ((to, len(targets)), (of, len(sources))):
        if len(rows) and not 0 <= rows.min() <= rows.max() < there:
            raise IndexError(f"a row is not among the {there} that there are")
    step = max(1, _PIECE_BYTES // row_bytes)
    for start in range(0, len(of), step):
        # numpy copies a row as one piece of memory, and lets other threads run.
        targets[to[start : start + step]] = sources[of[start : start + step]]


try:
    from workers.kv_transfer._rows import copy_rows as _copy
except ImportError:  # It is built where there is a compiler.
    _copy = copy_with_numpy


def copy_rows(target: Bytes, to: Rows, source: Bytes, of: Rows, row_bytes: int) -> None:
    """Copy row `of[i]` of `source` to row `to[i]` of `target`; row 0 is where either begins, and they do not overlap.

    Raises IndexError for a row outside, ValueError when `to` and `of` differ in length. Other threads run meanwhile.
    """
    _copy(target, to, source, of, row_bytes, True)


def pieces_of(source: Bytes, of: Rows, row_bytes: int) -> Iterator[Bytes]:
    """These rows one behind the other, as many at a time as fit the cache; each piece is gone with the next."""
    step = max(1, min(len(of), _PIECE_BYTES // row_bytes))
    room, in_order = aligned_zeros(step * row_bytes), np.arange(step)
    for start in range(0, len(of), step):
        rows = of[start : start + step]
        _copy(room, in_order[: len(rows)], source, rows, row_bytes, False)
        yield room[: len(rows) * row_bytes]


def aligned_zeros(num_bytes: int) -> Bytes:
    """At the begin of a page. Zeroed by the kernel, page by page at first use."""
    zeros = np.zeros(num_bytes + mmap.PAGESIZE, np.uint8)
    return zeros[-zeros.ctypes.data % mmap.PAGESIZE :][:num_bytes]


def compiled() -> bool:
    return _copy is not copy_with_numpy


def _as_rows(memory: Bytes, row_bytes: int) -> npt.NDArray[np.void]:
    rows: npt.NDArray[np.void] = memory[: len(memory) // row_bytes * row_bytes].view(f"V{row_bytes}")
    return rows
