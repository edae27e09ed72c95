"""KV where it lies in memory, which its sender and its receiver may both have."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from workers.errors import FrameError
from workers.kv_transfer.rows import Bytes, Crcs, Rows, copy_and_check, copy_rows, crcs_of
from workers.kv_transfer.segment import PLACE_BYTES, Mappings

# first plane, number of planes, rows of a plane, bytes of a row, tokens of a row
_SHAPE = struct.Struct("<IIQII")


@dataclass(frozen=True, slots=True, eq=False)
class KVRows:
    """Rows `index` of each of some planes (K or V of a layer) that lie one behind the other in `memory`.

    A row is the KV of `row_tokens` tokens in a row. What they hold, read in order, is a frame's payload. `place` is
    where other processes find the memory (workers/kv_transfer/segment.py); empty: they do not.
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

    @property
    def token_bytes(self) -> int:
        """Of K or V of one token of one layer."""
        return self.row_bytes // self.row_tokens

    def copy_to(self, payload: memoryview) -> None:
        """Raises ValueError when there is less room."""
        of = self.rows(self.row_tokens)
        copy_rows(np.frombuffer(payload, np.uint8), np.arange(len(of)), self.source, of, self.row_bytes)

    def copy_and_check(self, payload: memoryview) -> Crcs:
        """As copy_to; what crcs gives, of what was copied."""
        of, target = self.rows(self.row_tokens), np.frombuffer(payload, np.uint8)
        return copy_and_check(target, np.arange(len(of)), self.source, of, self.row_bytes, self.token_bytes)

    def crcs(self) -> Crcs:
        """The CRC-32C of K or V of each layer and token, in the payload's order."""
        return crcs_of(self.source, self.rows(self.row_tokens), self.row_bytes, self.token_bytes)

    def in_order(self, payload: memoryview) -> KVRows:
        """The same in `payload`, where it lies in order."""
        return self.of_payload(payload, self.num_planes, len(self.index) * self.row_tokens, self.place)

    def __bytes__(self) -> bytes:
        """The payload."""
        payload = bytearray(len(self))
        self.copy_to(memoryview(payload))
        return bytes(payload)

    @classmethod
    def of_payload(cls, payload: memoryview, num_planes: int, num_tokens: int, place: bytes = b"") -> KVRows:
        """The rows that it holds in order."""
        return cls(
            place,
            payload,
            first_plane=0,
            num_planes=num_planes,
            plane_rows=1,
            row_bytes=len(payload) // num_planes,
            row_tokens=num_tokens,
            index=np.zeros(1, np.int64),
        )

    def encode(self) -> bytes:
        shape = _SHAPE.pack(self.first_plane, self.num_planes, self.plane_rows, self.row_bytes, self.row_tokens)
        return self.place + shape + self.index.astype("<i8").tobytes()

    @classmethod
    def decode(cls, data: bytes, mappings: Mappings) -> KVRows:
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
        no_shape = not rows.row_bytes or not rows.row_tokens or rows.row_bytes % rows.row_tokens
        if outside or no_shape or num_bytes > len(rows.memory):
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
