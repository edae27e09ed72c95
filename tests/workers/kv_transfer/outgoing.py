"""Frames to send whose payload is at hand, not in a pool."""

from __future__ import annotations

from dataclasses import replace

from workers.kv_transfer.frame import Frame, Outgoing


def outgoing(frame: Frame, request_id: str = "r", checksum: bool = True) -> Outgoing:
    def fill(room: memoryview) -> None:
        room[:] = frame.payload

    return Outgoing(replace(frame, payload=b""), request_id, len(frame.payload), fill, checksum)
