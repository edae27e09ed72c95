"""Frames to send whose payload is at hand, not in a pool."""

from __future__ import annotations

from dataclasses import replace

from workers.kv_transfer.frame import Frame, UnsentFrame


def unsent(frame: Frame, request_id: str = "r", checksum: bool = True) -> UnsentFrame:
    def fill(room: memoryview) -> None:
        room[:] = frame.payload

    return UnsentFrame(replace(frame, payload=b""), request_id, len(frame.payload), fill, checksum)
