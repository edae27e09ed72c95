"""The seams between the two worker halves and the ways KV can travel.

A transport only moves frames. What is said about them (Connect, Commit, Release, Renew) goes over gRPC for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import grpc.aio

from protos import worker_pb2 as pb
from workers.kv_transfer.frame import Buffer, UnsentFrame
from workers.kv_transfer.kv_rows import KVRows

# A frame as one transport takes it.
Packed = TypeVar("Packed")


@dataclass(frozen=True, slots=True)
class Grant:
    """A decode worker's promise of blocks for one hand-off, fenced by its incarnation and an id never used again.

    The KV of token positions [start, end) is wanted; that of [0, start) is there already.
    """

    grant_id: int
    incarnation: str
    address: str
    lease_s: float
    start: int
    end: int

    def to_proto(self) -> pb.Grant:
        return pb.Grant(
            grant_id=self.grant_id,
            incarnation=self.incarnation,
            address=self.address,
            lease_s=self.lease_s,
            start=self.start,
            end=self.end,
        )

    @classmethod
    def from_proto(cls, message: pb.Grant) -> Grant:
        return cls(message.grant_id, message.incarnation, message.address, message.lease_s, message.start, message.end)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why frames cannot come by a transport."""

    reason: str
    # It ought to work between these two, and does not.
    is_fault: bool = False


class KVSender(Protocol[Packed]):
    """Moves frames to one peer."""

    def pack(self, frame: UnsentFrame) -> Packed:
        """Copy the frame to where it is sent from. One thread at a time calls this, and it is not the loop's."""

    async def send(self, packed: Packed, timeout_s: float) -> None:
        """Return once the peer has verified the frame and put it into its pool.

        Raises FrameError, StaleGrantError, UnavailableError or DeadlineError.
        """

    async def close(self) -> None: ...


class KVReceiver(Protocol):
    """Takes frames in, whatever brought them."""

    async def receive(self, data: Buffer, elsewhere: KVRows | None = None) -> None:
        """Verify an encoded frame and put its KV where its grant says. Raises FrameError or StaleGrantError.

        `elsewhere`: where its payload lies, if not behind its header.
        """


class Transport(Protocol):
    """One way for KV to travel: opens senders, and lets a receiver be reached."""

    name: str
    # Its frames have so many times transfer.frame_bytes.
    frame_scale: int

    def sender(self, address: str, incarnation: str) -> KVSender[Any]:
        """To that incarnation of the worker at `address`, and no other."""

    def serve(self, receiver: KVReceiver, server: grpc.aio.Server) -> None:
        """Before `server` starts: what it must answer for this transport."""

    def reachable(self, receiver: KVReceiver, address: str) -> None:
        """The server answers at `address`."""

    def offer(self) -> bytes:
        """What a receiver must know to tell whether this sender can reach it so."""

    def refusal(self, offer: bytes) -> Refusal | None:
        """Why frames of the sender that made `offer` cannot be received so; None: they can."""
