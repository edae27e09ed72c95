"""Frames go through a session of two workers until anything in it fails; the next frame begins another session."""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass
from typing import ClassVar, Protocol

import grpc.aio

from workers.errors import DeadlineError, UnavailableError
from workers.kv_transfer.frame import UnsentFrame
from workers.rpc import Network


@dataclass(frozen=True, slots=True)
class Pair:
    """What a session is known by: both incarnations, and how many sessions this sender began before."""

    sender: str
    receiver: str
    number: int

    FIELDS: ClassVar = struct.Struct("<16s16sI")

    def pack(self) -> bytes:
        return self.FIELDS.pack(bytes.fromhex(self.sender), bytes.fromhex(self.receiver), self.number)

    @classmethod
    def unpack(cls, data: bytes) -> tuple[Pair, bytes]:
        """The pair that `data` begins with, and the rest."""
        sender, receiver, number = cls.FIELDS.unpack_from(data)
        return cls(sender.hex(), receiver.hex(), number), data[cls.FIELDS.size :]

    def __str__(self) -> str:
        return f"{self.sender}/{self.receiver}/{self.number}"


class Session(Protocol):
    @property
    def ended(self) -> bool: ...

    async def put(self, packed: bytearray, timeout_s: float) -> None:
        """As KVSender.send. Whatever leaves it in doubt, ends it."""

    def end(self) -> None:
        """On both sides. Again is no error."""


class Opening(Protocol):
    async def __call__(self, channel: grpc.aio.Channel) -> Session:
        """Raises UnavailableError."""


class SessionSender:
    def __init__(self, network: Network, address: str, open_session: Opening) -> None:
        self._channel = network.connect(address, bulk=True)
        self._address = address
        self._open_session = open_session
        self._session: Session | None = None
        self._opening = asyncio.Lock()
        self._sending: set[asyncio.Task[None]] = set()

    def pack(self, frame: UnsentFrame) -> bytearray:
        packed = bytearray(frame.encoded_bytes)
        frame.encode_into(memoryview(packed))
        return packed

    async def send(self, packed: bytearray, timeout_s: float) -> None:
        sending = asyncio.create_task(self._send(packed, timeout_s), name=f"send KV to {self._address}")
        self._sending.add(sending)
        sending.add_done_callback(self._sent)
        try:
            # Shielded: a frame that is given up half-way would cost the others their session.
            await asyncio.shield(sending)
        except asyncio.CancelledError:
            # Whoever is cancelled has its credit for as long as the frame is on its way.
            await asyncio.wait((sending,))
            raise

    async def close(self) -> None:
        if self._session is not None:
            self._session.end()
        await self._channel.close()
        await asyncio.gather(*self._sending, return_exceptions=True)

    async def _send(self, packed: bytearray, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                session = await self._ready()
                await session.put(packed, timeout_s)
        except grpc.aio.UsageError:
            raise UnavailableError(f"the connection to {self._address} was closed") from None
        except TimeoutError:
            raise DeadlineError(f"{self._address} took no frame within {timeout_s} s") from None

    def _sent(self, sending: asyncio.Task[None]) -> None:
        self._sending.discard(sending)
        if not sending.cancelled():
            sending.exception()  # Seen, even if who waited for it was cancelled.

    async def _ready(self) -> Session:
        async with self._opening:
            if self._session is None or self._session.ended:
                self._session = await self._open_session(self._channel)
            return self._session
