"""Frames to send whose payload is at hand, not in a pool."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from workers.kv_transfer.base import KVSender
from workers.kv_transfer.frame import Frame, UnsentFrame


def unsent(frame: Frame, request_id: str = "r", checksum: bool = True) -> UnsentFrame:
    def fill(room: memoryview) -> None:
        room[:] = frame.payload

    return UnsentFrame(replace(frame, payload=b""), request_id, len(frame.payload), fill, checksum)


async def send_frame(sender: KVSender[Any], frame: Frame, request_id: str, timeout_s: float) -> None:
    await sender.send(sender.pack(unsent(frame, request_id)), timeout_s)
