"""Frames to send whose payload is at hand, not in a pool."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from workers.kv_transfer.base import KVSender
from workers.kv_transfer.frame import Buffer, Digest, Frame, UnsentFrame
from workers.kv_transfer.kv_rows import KVRows


def unsent(frame: Frame, request_id: str = "r", checksum: bool = True) -> UnsentFrame:
    def fill(room: memoryview) -> None:
        room[:] = bytes(frame.payload)

    return UnsentFrame(replace(frame, payload=b""), request_id, len(frame.payload), fill, checksum)


def encode(frame: Frame, request_id: str, checksum: bool = True) -> bytes:
    header = unsent(frame, request_id, checksum).header(frame.payload)
    return header + bytes(frame.payload)


def verify(frame: Frame, checksum: int, request_id: str) -> None:
    digest = Digest(frame, request_id)
    digest.see(digest.crcs_of(frame.payload))
    digest.require(checksum)


def whole(data: Buffer, elsewhere: KVRows | None) -> bytes:
    """The encoded frame, as a KVReceiver gets it, with its payload."""
    return bytes(data) + (b"" if elsewhere is None else bytes(elsewhere))


async def send_frame(sender: KVSender[Any], frame: Frame, request_id: str, timeout_s: float) -> None:
    await sender.send(sender.pack(unsent(frame, request_id)), timeout_s)
