"""KV where it lies in memory that its sender and its receiver both have."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from workers.errors import FrameError
from workers.kv_transfer.rows import Bytes, Rows, pieces_of
from workers.kv_transfer.segment import PLACE_BYTES, Mappings

# first plane, number of planes, rows of a plane, bytes of a row, tokens of a row
_SHAPE = struct.Struct("<IIQII")


@dataclass(frozen=True, slots=True, eq=False)
class SharedRows:
    """Rows `index` of each of some planes (K or V of a layer) that lie one behind the other in a segment.

    A row is the KV of `row_tokens` tokens in a row. What they hold, read in order, is a frame's payload.
    """

    place: bytes
    memory: memoryview
    first_plane: int
    num_planes: int
    plane_rows: int
    row_bytes: int
    row_tokens: int
    # [rows] of int64
    index: Rows

    def __len__(self) -> int:
        return self.num_planes * len(self.index) * self.row_bytes

    @property
    def source(self) -> Bytes:
        return np.frombuffer(self.memory, np.uint8)

    def rows(self, row_tokens: int) -> Rows:
        """All of them, plane by plane, counted from the segment's begin, in rows of so many tokens, a divisor of
        theirs."""
        parts = self.row_tokens // row_tokens
        index = split_rows(self.index, parts)
        return flat_rows(self.first_plane, self.num_planes, self.plane_rows * parts, index)

    def pieces(self) -> Iterator[memoryview]:
        """The payload, piece by piece; each is gone with the next."""
        return (piece.data for piece in pieces_of(self.source, self.rows(self.row_tokens), self.row_bytes))

    def __bytes__(self) -> bytes:
        """The payload."""
        return b"".join(bytes(piece) for piece in self.pieces())

    def in_order(self, payload: memoryview) -> SharedRows:
        """The same rows in `payload`, one behind the other."""
        num_rows = len(self.index)
        return replace(self, memory=payload, first_plane=0, plane_rows=num_rows, index=np.arange(num_rows))

    def encode(self) -> bytes:
        shape = _SHAPE.pack(self.first_plane, self.num_planes, self.plane_rows, self.row_bytes, self.row_tokens)
        return self.place + shape + self.index.astype("<i8").tobytes()

    @classmethod
    def decode(cls, data: bytes, mappings: Mappings) -> SharedRows:
        """Raises FrameError when it is none, or lies where this process cannot see it."""
        try:
            shape = _SHAPE.unpack_from(data, PLACE_BYTES)
            index = np.frombuffer(data, "<i8", offset=PLACE_BYTES + _SHAPE.size)
        except (struct.error, ValueError) as error:
            raise FrameError(f"not the place of a KV frame: {error}") from error
        place = data[:PLACE_BYTES]
        first_plane, num_planes, plane_rows, row_bytes, row_tokens = shape
        rows = cls(place, mappings.memory(place), first_plane, num_planes, plane_rows, row_bytes, row_tokens, index)
        num_bytes = (rows.first_plane + rows.num_planes) * rows.plane_rows * rows.row_bytes
        outside = len(index) and not 0 <= index.min() <= index.max() < rows.plane_rows
        if outside or not rows.row_bytes or not rows.row_tokens or num_bytes > len(rows.memory):
            raise FrameError("the place of a KV frame lies outside the memory that its sender shares")
        return rows


def flat_rows(first_plane: int, num_planes: int, plane_rows: int, index: Rows) -> Rows:
    """Rows `index` of each of these planes, as rows of the memory in which planes lie one behind the other."""
    planes = np.arange(first_plane, first_plane + num_planes, dtype=np.int64)
    rows: Rows = (planes[:, None] * plane_rows + index).reshape(-1)
    return rows


def split_rows(index: Rows, parts: int) -> Rows:
    """The same rows, each cut into so many."""
    rows: Rows = (index[:, None] * parts + np.arange(parts)).reshape(-1)
    return rows
