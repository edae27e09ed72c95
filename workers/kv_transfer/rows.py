"""Copies of many short rows of memory, as KV lies in blocks all over a pool."""

from __future__ import annotations

import mmap

import google_crc32c
import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Crcs = npt.NDArray[np.uint32]
# What fits the cache, and leaves room there for what else a core does.
_PIECE_BYTES = 768 << 10
_NOWHERE: Bytes = np.empty(0, np.uint8)
_NO_CRCS: Crcs = np.empty(0, np.uint32)


def copy_with_numpy(
    target: Bytes, to: Rows, source: Bytes, of: Rows, crcs: Crcs, row_bytes: int, unit_bytes: int
) -> None:
    """As the compiled one, slower."""
    if len(target) and len(to) != len(of):
        raise ValueError(f"{len(of)} rows are to be copied to {len(to)}")
    targets, sources = _as_rows(target, row_bytes), _as_rows(source, row_bytes)
    for rows, there in ((to if len(target) else to[:0], len(targets)), (of, len(sources))):
        if len(rows) and not 0 <= rows.min() <= rows.max() < there:
            raise IndexError(f"a row is not among the {there} that there are")
    step = max(1, _PIECE_BYTES // row_bytes)
    for start in range(0, len(of), step):
        # numpy copies a row as one piece of memory, and lets other threads run.
        piece = sources[of[start : start + step]]
        if len(target):
            targets[to[start : start + step]] = piece
        if len(crcs):
            first = start * (row_bytes // unit_bytes)
            units = piece.view(np.uint8)
            ends = range(unit_bytes, len(units) + 1, unit_bytes)
            found = [google_crc32c.value(units[end - unit_bytes : end].tobytes()) for end in ends]
            crcs[first : first + len(ends)] = found


try:
    from workers.kv_transfer._rows import copy_rows as _copy
except ImportError:  # It is built where there is a compiler, for x86.
    _copy = copy_with_numpy


def copy_rows(target: Bytes, to: Rows, source: Bytes, of: Rows, row_bytes: int) -> None:
    """Copy row `of[i]` of `source` to row `to[i]` of `target`; row 0 is where either begins, and they do not overlap.

    Raises IndexError for a row outside, ValueError when `to` and `of` differ in length. Other threads run meanwhile.
    """
    _copy(target, to, source, of, _NO_CRCS, row_bytes, row_bytes)


def copy_and_check(target: Bytes, to: Rows, source: Bytes, of: Rows, row_bytes: int, unit_bytes: int) -> Crcs:
    """As copy_rows, and the CRC-32C of each unit of what was copied, in order: each byte is read once."""
    crcs: Crcs = np.empty(len(of) * (row_bytes // unit_bytes), np.uint32)
    _copy(target, to, source, of, crcs, row_bytes, unit_bytes)
    return crcs


def crcs_of(source: Bytes, of: Rows, row_bytes: int, unit_bytes: int) -> Crcs:
    """The CRC-32C of each unit of these rows, in order."""
    return copy_and_check(_NOWHERE, of[:0], source, of, row_bytes, unit_bytes)


def aligned_zeros(num_bytes: int) -> Bytes:
    """At the begin of a page. Zeroed by the kernel, page by page at first use."""
    zeros = np.zeros(num_bytes + mmap.PAGESIZE, np.uint8)
    return zeros[-zeros.ctypes.data % mmap.PAGESIZE :][:num_bytes]


def compiled() -> bool:
    return _copy is not copy_with_numpy


def _as_rows(memory: Bytes, row_bytes: int) -> npt.NDArray[np.void]:
    rows: npt.NDArray[np.void] = memory[: len(memory) // row_bytes * row_bytes].view(f"V{row_bytes}")
    return rows
