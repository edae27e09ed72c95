"""Damage to frames that go by shared memory: what is said of a payload, and what its receiver reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cluster.sim.network import Fault, corrupt
from workers.kv_transfer.frame import HEADER_BYTES
from workers.kv_transfer.kv_rows import KVRows
from workers.kv_transfer.segment import Mappings, Segment


class SharedFrames:
    """Keeps what it puts in the place of payloads for as long as somebody may read it."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []

    def flip(self, part: float, mask: int) -> Fault:
        """Flip bits of the byte at `part` in [0, 1) of a frame: of the message, or of the payload that comes after it.

        The sender's pool stays as it is: what it sends again is true.
        """

        def fault(message: bytes) -> Sequence[tuple[float, bytes]]:
            rows = KVRows.decode(message[HEADER_BYTES:], Mappings())
            at = int(part * (len(message) + len(rows)))
            if at < len(message):
                return corrupt(at, mask)(message)
            return ((0.0, message[:HEADER_BYTES] + self._copy(rows, at - len(message), mask).encode()),)

        return fault

    def _copy(self, rows: KVRows, at: int, mask: int) -> KVRows:
        segment = Segment(len(rows))
        self._segments.append(segment)
        rows.copy_to(segment.memory)
        segment.memory[at] ^= mask
        return replace(rows.in_order(segment.memory), place=segment.place)
